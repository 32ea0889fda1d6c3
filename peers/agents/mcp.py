"""The environment `mcp`: the tasks of a data set, with the tools of an MCP server."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from peers.agents.mcp_client import ERROR, HttpSession, McpSession, PipeSession, Tool
from peers.agents.servers import ServerError, ServerName
from peers.agents.sessions import Sessions
from peers.endpoint.tools import CALL_ID, FORMS, Call, check_form
from peers.environments.chat_template import ChatTemplate
from peers.environments.dataset import Dataset, DatasetOptions
from peers.environments.interface import (
    Conversation,
    Episodes,
    Grade,
    Task,
    Tasks,
    ToolMessage,
    Transcript,
    messages_of,
)
from peers.environments.play import Observation
from swarm.errors import DECODE_ERRORS


class McpOptions(DatasetOptions, frozen=True, kw_only=True):
    """The tasks, and which tools there are (docs/agents.md)."""

    server: ServerName
    calls: Literal["hermes", "mistral", "llama"] = "hermes"
    offer: Literal["template", "none"] = "template"
    turns: Annotated[int, Meta(ge=1, le=64)] = 8
    result_characters: Annotated[int, Meta(ge=1, le=65_536)] = 4096
    must_call: bool = False


@dataclass(eq=False)
class _Played:
    """An episode: the calls of each turn so far, and their results."""

    is_text: bool
    """Whether its prompt is text."""
    turns: list[tuple[tuple[Call, ...], list[str]]] = field(default_factory=list)


class Mcp(Dataset, Episodes):
    """Rewards as `dataset` does what the model writes last, after its calls of tools."""

    name = "mcp"
    version = "1"
    replayable = False
    Options = McpOptions
    options: McpOptions

    def __init__(self, options: McpOptions) -> None:
        """Open the data and read the server's file; raises `UserError`."""
        super().__init__(options)
        self._sessions: Sessions[McpSession] = Sessions(options.server, self._opened)
        self.call_seconds = max(self.call_seconds, self._sessions.call_seconds)
        self._form = FORMS[options.calls]
        self._shared = object()
        """Stands for all episodes with a server that is stateless."""
        self._tools: dict[str, Tool] = {}

    def tasks(self) -> Tasks:
        """The rows. Were a server's failure that of a row, another row would be drawn."""
        self._offered()
        return super().tasks()

    def task_of_row(self, index: int) -> Task:
        """The task of a row, with the tools that the server lists.

        A column `demonstration`, of the model's turns, is for `swarm sft` and warm-ups."""
        task = super().task_of_row(index)
        turns = task.data.get("demonstration")
        task = replace(task, demonstration=tuple(turns) if isinstance(turns, list) else ())
        if self.options.offer == "none":
            return task
        tools = json.dumps([each.definition() for each in self._offered().values()])
        return replace(task, prompt=Conversation(messages_of(task.prompt), (("tools", tools),)))

    def start(self, task: Task) -> _Played:
        return _Played(isinstance(task.prompt, str))

    def step(self, state: _Played, text: str) -> Observation | None:
        """The results of the calls that end the text; None without a call, or beyond `turns`.

        Raises `UserError` when the server fails."""
        _, calls = self._form.read(text)
        if not calls or len(state.turns) >= self.options.turns:
            self._sessions.release(state)
            return None
        is_stateless = self._sessions.definition.is_stateless

        def called(session: McpSession, is_own: bool) -> list[str]:
            for before, given in [] if is_own or is_stateless else state.turns:
                if self._results(session, before) != given:
                    raise ServerError("gives other results when calls are made again")
            return self._results(session, calls)

        results = self._sessions.ask(self._shared if is_stateless else state, called)
        state.turns.append((calls, results))
        if state.is_text:
            return "".join(f"<result>{each}</result>" for each in results)
        return tuple(
            ToolMessage("tool", result, tool_call_id=CALL_ID, name=call.name)
            for call, result in zip(calls, results, strict=True)
        )

    def check_template(self, template: ChatTemplate) -> None:
        if self.options.offer == "template":
            check_form(template, self.options.calls, self.where)

    def grade(self, task: Task, transcript: Transcript) -> Grade:
        """The grader's reward for the last turn; raises as the grader."""
        said = [turn.text for turn in transcript.turns if turn.kind == "environment"]
        used = any(ERROR not in text for text in said)
        grade = super().grade(task, transcript)
        reward = grade.reward if used or not self.options.must_call else 0.0
        return Grade(reward, {**grade.parts, "tool": float(used)})

    # --- the server ---------------------------------------------------------------------------

    def _opened(self) -> McpSession:
        limits = self._sessions.definition
        session = HttpSession(limits) if limits.url else PipeSession(limits)
        try:
            session.begin(self._sessions.deadline() + limits.start_seconds)
        except BaseException:
            session.close()
            raise
        return session

    def _offered(self) -> dict[str, Tool]:
        """The tools by name, as the server listed them first; raises `UserError`."""
        if not self._tools:
            owner = self._shared if self._sessions.definition.is_stateless else object()
            listed = self._sessions.ask(
                owner, lambda session, _: session.tools(self._sessions.deadline())
            )
            self._sessions.release(owner)
            self._tools = {each.name: each for each in listed}
        return self._tools

    def _results(self, session: McpSession, calls: Sequence[Call]) -> list[str]:
        results, deadline = [], self._sessions.deadline()
        for call in calls:
            tool = self._offered().get(call.name)
            text = f"{ERROR}there is no tool {call.name:.128}; there are: {', '.join(self._tools)}"
            if tool is not None:
                try:  # Python's JSON has numbers and halves of characters that no server takes
                    arguments = msgspec.json.decode(call.arguments)
                except (*DECODE_ERRORS, UnicodeEncodeError) as error:
                    text = f"{ERROR}the arguments are no JSON ({error})"
                else:
                    text = session.call(tool, arguments, deadline)
            results.append(text[: self.options.result_characters])
        return results
