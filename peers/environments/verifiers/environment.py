"""The environment `verifiers`: any package of the `verifiers` library."""

import json
import math
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from peers.endpoint.tools import FORMS, answer_of, check_form
from peers.environments import interface
from peers.environments.chat_template import ChatTemplate
from peers.environments.graders.pool import Pool, ProcessFailed, ServiceError
from peers.environments.play import Observation
from peers.environments.tasks import Numbered
from peers.environments.verifiers.installed import install_command, interpreter_for
from swarm.errors import UserError

OPEN_SECONDS = 180.0
"""Deadline to import and load the environment: 10 s of computing, longer for a large data set."""

SERVICE = "peers.environments.verifiers.child.service:Player"

COMPLETION_ROLE = "text"
"""The role of a prompt that the model continues rather than answers, in the older interface."""


class VerifiersOptions(interface.ScaledOptions, frozen=True, kw_only=True):
    """Which package, and what it may use (docs/verifiers.md)."""

    package: str
    version: str = ""
    library: Literal["0.4.0", "0.3.1"] = "0.4.0"
    arguments: str = "{}"
    player: str = ""
    tasks: Annotated[int, Meta(ge=1, le=1_000_000)] = 1000
    seconds: Annotated[float, Meta(gt=0, le=3600)] = 60.0
    memory_mib: Annotated[int, Meta(ge=256)] = 4096
    calls: Literal["none", "hermes", "mistral", "llama"] = "none"


@dataclass
class _Played:
    """The state of an episode."""

    index: int
    texts: list[str] = field(default_factory=list)


class Verifiers(interface.Episodes):
    """Plays a package of `verifiers` in a child process under that library's own Python."""

    name = "verifiers"
    version = "1"
    Options = VerifiersOptions
    options: VerifiersOptions

    def __init__(
        self,
        options: VerifiersOptions | None = None,
        *,
        interpreter: Path | None = None,
        open_seconds: float = OPEN_SECONDS,
    ) -> None:
        """Check the options; raises `UserError`. The child starts with the first task, by
        `interpreter` if that is given, else by the Python of `library`."""
        if options is None or not options.package:
            raise UserError(
                "environment 'verifiers' plays a package; name one with the option package"
            )
        super().__init__(options)
        options.check("environment 'verifiers'")
        # The first call starts the child, and a task may take several; each has its own deadline.
        self.call_seconds = open_seconds + 4 * options.seconds
        self._form, self._has_tools = FORMS.get(options.calls), False
        self._pool = Pool(
            SERVICE,
            options.seconds,
            options.memory_mib << 20,
            arguments={
                "package": options.package,
                "arguments": self._arguments(),
                "tasks_max": options.tasks,
                "player": options.player,
            },
            interpreter=interpreter or interpreter_for(options.library),
            start_seconds=open_seconds,
        )

    def close(self) -> None:
        self._pool.close()

    def tasks(self) -> Numbered:
        """The package's first tasks, uniform within each split; raises `UserError`."""
        return Numbered.of(self._count, self._task)

    def start(self, task: interface.Task) -> _Played:
        return _Played(task.data["index"])

    def step(self, state: _Played, text: str) -> Observation | None:
        """What the package says next; raises `UserError` when its code fails."""
        state.texts.append(text)
        texts = [self._read(each) for each in state.texts]
        said = self._asked(what="step", task=state.index, texts=texts)
        return _prompt(said) if said else None

    def check_template(self, template: ChatTemplate) -> None:
        if self._has_tools:
            check_form(template, self.options.calls, "environment 'verifiers'")

    def grade(self, task: interface.Task, transcript: interface.Transcript) -> interface.Grade:
        """The package's own reward, scaled to [0, 1], and its parts; raises `NotGradable` when its
        code fails or needs what a transcript does not have."""
        written = [turn.text for turn in transcript.turns if turn.kind == "model"]
        texts = [self._read(text) for text in written[:-1]]
        texts.append(self._read(written[-1], transcript.finished))
        episode = {"task": task.data["index"], "texts": texts, "finished": transcript.finished}
        try:
            reward, parts = self._pool.ask({"what": "grade", **episode})
        except (ProcessFailed, ServiceError) as error:
            raise interface.NotGradable(f"package {self.options.package!r}: {error}") from error
        reward = self.options.scaled(reward, f"package {self.options.package!r}")
        parts = {name: part for name, part in parts.items() if math.isfinite(part)}
        return interface.Grade(reward, parts)

    @cached_property
    def _count(self) -> int:
        options = self.options
        tasks, version = self._asked(what="opened")
        if options.version and version != options.version:
            there = version or "an unknown version"
            raise UserError(
                f"package {options.package!r} is installed in version {there!r}, but the run wants "
                f"{options.version!r}; type: {install_command(options.library)} --package "
                f"{options.package}=={options.version}"
            )
        return int(tasks)

    def _task(self, index: int) -> interface.Task:
        said, answer, tools, boxed = self._asked(what="draw", task=index)
        prompt: interface.Prompt = _prompt(said)
        self.replayable = not boxed  # a command may show the time
        if tools and self._form is None:
            raise UserError(
                f"package {self.options.package!r} has tools, but the option calls is 'none'; set "
                f"it to the form in which the checkpoint's chat template writes calls: "
                f"{', '.join(FORMS)}"
            )
        if tools:
            self._has_tools = True
            prompt = interface.Conversation(interface.messages_of(prompt), (("tools", tools),))
        return interface.Task(prompt, answer, {"index": index})

    def _read(self, text: str, finished: bool = True) -> tuple[str, list[tuple[str, str]]]:
        """A turn as the child gets it: its text, and its calls by name and arguments."""
        content, calls = answer_of(text, "stop" if finished else "length", self._form)
        return content, [(call.name, call.arguments) for call in calls]

    def _asked(self, **request: Any) -> Any:
        try:
            return self._pool.ask(request)
        except (ProcessFailed, ServiceError) as error:
            package, library = self.options.package, self.options.library
            raise UserError(
                f"package {package!r} cannot be played with verifiers {library}: {error}; correct "
                f"its options, or install it: {install_command(library)} --package {package}"
            ) from error

    def _arguments(self) -> dict[str, Any]:
        arguments: Any = None
        with suppress(ValueError):
            arguments = json.loads(self.options.arguments)
        if not isinstance(arguments, dict):
            raise UserError(
                f"environment 'verifiers': arguments {self.options.arguments!r:.60} is no JSON "
                "object; write it like '{\"difficulty\": 2}'"
            )
        return arguments


def _prompt(said: list[tuple[str, str, str, str, str]]) -> Observation:
    """What was said: role, content, calls, the id of the call that it answers, and its tool."""
    if all(each[0] == COMPLETION_ROLE for each in said):
        return "".join(each[1] for each in said)
    return tuple(
        interface.ToolMessage(*each) if any(each[2:]) else interface.Message(*each[:2])
        for each in said
    )
