"""The environment `tools`: arithmetic that is easy with a calculator or a Python interpreter."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from peers.environments.interface import Episodes, Grade, Task, Tasks, Transcript
from peers.environments.tasks import Generated
from peers.environments.tools.calls import Runner, calculate, called, run_python
from peers.sandbox import run
from swarm.rollouts.seeds import digest

WORDS = (
    "Compute {expression}. You may use tools: end your turn with a call, and its result follows as "
    "<result>...</result>.{tools} At the end write the number alone.\n"
)
TOOLS = {
    "calc": " <calc>12*34</calc> computes an expression.",
    "python": " <python>print(12*34)</python> runs a Python program and shows its output.",
}
LAST_NUMBER = re.compile(r"(-?[0-9]+)[^0-9]*\Z")


class ToolsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which tools there are, and how hard the arithmetic is."""

    tools: Annotated[list[Literal["calc", "python"]], Meta(min_length=1, max_length=2)] = (
        msgspec.field(default_factory=lambda: ["calc"])
    )
    """A run with `python` must be served: two runs of a program may print different text."""
    digits: Annotated[int, Meta(ge=1, le=9)] = 3
    """Largest number of digits of an operand."""
    operations: Annotated[int, Meta(ge=1, le=16)] = 2
    calls: Annotated[int, Meta(ge=1, le=16)] = 4
    """Calls that are answered in an episode."""
    statement: Literal["words", "bare"] = "words"
    """bare: the prompt is the expression and `>`, for a policy of characters."""
    must_call: bool = False
    """Whether the right answer earns nothing unless a tool gave a result before it."""


@dataclass
class _Calls:
    answered: int = 0


class Tools(Episodes):
    """Rewards the right number at the end, whatever tools found it."""

    name = "tools"
    version = "1"
    safe_for_strangers = True
    Options = ToolsOptions
    options: ToolsOptions

    def __init__(
        self,
        options: ToolsOptions = ToolsOptions(),  # noqa: B008
        run_program: Runner = run,
    ) -> None:
        super().__init__(options)
        self.replayable = "python" not in options.tools
        self._tools: dict[str, Callable[[str], str]] = {
            "calc": calculate,
            "python": lambda source: run_python(source, run_program),
        }

    def tasks(self) -> Tasks:
        """Sums, differences and products, uniform over the expressions of the split."""
        return Generated(self._make)

    def start(self, task: Task) -> _Calls:
        return _Calls()

    def step(self, state: _Calls, text: str) -> str | None:
        """The result of the call that ends the text; None without a call or beyond `calls`."""
        call = called(text, self.options.tools)
        if call is None or state.answered >= self.options.calls:
            return None
        state.answered += 1
        name, given = call
        return f"<result>{self._tools[name](given)}</result>"

    def grade(self, task: Task, transcript: Transcript) -> Grade:
        """1 if the last number of the last turn is the answer."""
        match = LAST_NUMBER.search(transcript.text[-200:])
        right = transcript.finished and match is not None and match[1] == task.answer
        observed = [turn.text for turn in transcript.turns if turn.kind == "environment"]
        used = any("<result>error" not in text for text in observed)
        earned = right and (used or not self.options.must_call)
        return Grade(float(earned), {"answer": float(right), "tool": float(used)})

    def _make(self, randomness: bytes) -> Task:
        # At most 10^153 · 3^16 expressions: 1024 bits modulo that favour none measurably.
        blocks = (digest("swarm/1/tools", randomness, bytes([block])) for block in range(4))
        number = int.from_bytes(b"".join(blocks), "big")
        parts: list[str] = []
        for index in range(self.options.operations + 1):
            if index:
                number, operation = divmod(number, 3)
                parts.append("+-*"[operation])
            number, operand = divmod(number, 10**self.options.digits)
            parts.append(str(operand))
        expression = "".join(parts)
        prompt = f"{expression}>"
        if self.options.statement == "words":
            tools = "".join(TOOLS[name] for name in self.options.tools)
            prompt = WORDS.format(expression=expression, tools=tools)
        tool, answer = self.options.tools[0], calculate(expression)
        given = expression if tool == "calc" else f"print({expression})"
        return Task(prompt, answer, demonstration=(f"<{tool}>{given}</{tool}>", answer))
