"""The environment `openenv`: a server of the OpenEnv protocol, reset, stepped, and asked its state.

A session is a WebSocket at `/ws`: `{"type": "reset", "data": {"seed": 7}}` begins an episode,
`{"type": "step", "data": ACTION}` plays a turn, and each gets `{"type": "observation", "data":
{"observation": {…}, "reward": 0.5, "done": false}}`. (Meta's OpenEnv; `openenv` on PyPI.)"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from peers.agents.servers import Gone, Program, ServerError, ServerName, decoded
from peers.agents.sessions import Sessions
from peers.agents.websocket import WebSocket
from peers.environments.columns import Row, value_of
from peers.environments.dataset import FIELD, Pairs, prompt_in, text_in
from peers.environments.interface import (
    Episodes,
    Grade,
    NotGradable,
    ScaledOptions,
    Task,
    Transcript,
    messages_of,
)
from peers.environments.pairs import json_pairs
from peers.environments.play import Observation
from peers.environments.tasks import Numbered
from swarm.errors import DECODE_ERRORS, UserError
from swarm.world.recent import Recent

PLAYED_KEPT = 4096
"""Episodes that are over whose rewards are remembered; others are played again to be graded."""

REWARD_MAX = 1e300
REFUSED = "VALIDATION_ERROR"
"""Code of the protocol for an action of the wrong form."""


class OpenEnvOptions(ScaledOptions, frozen=True, kw_only=True):
    """Which server, and what its messages mean (docs/agents.md)."""

    server: ServerName
    tasks: Annotated[int, Meta(ge=1, le=1_000_000)] = 1000
    reset: Pairs = msgspec.field(default_factory=list)
    task: Annotated[str, Meta(max_length=10_000)] = ""
    answer: Annotated[str, Meta(max_length=10_000)] = ""
    observation: Annotated[str, Meta(max_length=10_000)] = ""
    action: Annotated[str, Meta(max_length=200)] = ""
    turns: Annotated[int, Meta(ge=1, le=64)] = 1
    reward: Literal["last", "sum", "max"] = "last"


@dataclass(frozen=True)
class Stepped:
    """What a server gave for a turn."""

    said: Observation
    reward: float | None
    is_over: bool


@dataclass(eq=False)
class _Played:
    """An episode: the model's turns, and what the server gave for each."""

    seed: int
    texts: list[str] = field(default_factory=list)
    steps: list[Stepped] = field(default_factory=list)


class Refused(ServerError):
    """The server answers with an error; its session lives on."""

    def __init__(self, told: Row) -> None:
        self.code, self.told = told.get("code"), told.get("errors") or told.get("message")
        super().__init__(f"answers with the error {self.code!s:.40}: {self.told!s:.200}")


class Connection:
    """A session with a server: one episode after another. Its methods raise `ServerError`."""

    is_used = False

    def __init__(self, socket: WebSocket) -> None:
        self._socket = socket
        self._episode: Any = None
        """What the server calls the episode, if it does."""

    def close(self) -> None:
        self._socket.close()

    def reset(self, parameters: Row, deadline: float) -> Row:
        given = self._observed("reset", parameters, deadline)
        if given["done"]:
            raise ServerError("says that an episode is over before its first turn")
        self._episode = self._state(deadline)
        return given

    def step(self, action: Row, deadline: float) -> Row:
        """Play a turn. The state is asked for after it, so that no answer can be another's."""
        given = self._observed("step", action, deadline)
        if self._state(deadline) != self._episode:
            raise Gone("answers with the turn of another episode")
        return given

    def _state(self, deadline: float) -> Any:
        return self._asked({"type": "state"}, "state", deadline).get("episode_id")

    def _observed(self, what: str, data: Row, deadline: float) -> Row:
        given = self._asked({"type": what, "data": data}, "observation", deadline)
        reward, is_over = given.get("reward"), given.get("done")
        if not isinstance(given.get("observation"), dict):
            raise ServerError(f"answers a {what} without an observation")
        is_number = isinstance(reward, int | float) and not isinstance(reward, bool)
        fits = reward is None or (is_number and abs(reward) <= REWARD_MAX)
        if not fits or not isinstance(is_over, bool):
            raise ServerError(f"gives the reward {reward!r:.40} and done = {is_over!r:.40}")
        return given

    def _asked(self, message: Row, answer: str, deadline: float) -> Row:
        given = decoded(self._socket.ask(json.dumps(message), deadline))
        data = given.get("data") if isinstance(given, dict) else None
        if isinstance(data, dict) and given.get("type") == "error":
            raise Refused(data)
        if not isinstance(data, dict) or given.get("type") != answer:
            raise Gone(f"answers with {given!r:.60}, which is not of the type {answer}")
        return data


class OpenEnv(Episodes):
    """Plays a server's episodes with the model's turns as actions; rewards are the server's.

    An episode whose session is lost, or that is graded elsewhere, is played again alike."""

    name = "openenv"
    version = "1"
    replayable = False
    Options = OpenEnvOptions
    options: OpenEnvOptions

    def __init__(self, options: OpenEnvOptions) -> None:
        """Check the options and read the server's file; raises `UserError`."""
        super().__init__(options)
        where = f"environment {self.name!r}: options"
        options.check(where)
        self._reset = json_pairs(options.reset, f"{where}: reset")
        self._sessions: Sessions[Connection] = Sessions(options.server, self._connected)
        self._program: Program | None = None
        self._url = self._sessions.definition.url
        self.call_seconds = self._sessions.call_seconds
        self._over: Recent[tuple[int, tuple[str, ...]], list[Stepped]] = Recent(PLAYED_KEPT)

    def tasks(self) -> Numbered:
        """The episodes by seed, uniform within each split; raises `UserError`."""
        return Numbered.of(self.options.tasks, self._task)

    def start(self, task: Task) -> _Played:
        return _Played(task.data["index"])

    def step(self, state: _Played, text: str) -> Observation | None:
        """What the server gives for a turn; raises `UserError` when it fails."""
        state.texts.append(text)
        last = self._advanced(state)
        if last.is_over or len(state.texts) >= self.options.turns:
            self._over[state.seed, tuple(state.texts)] = state.steps
            self._sessions.release(state)
            return None
        return last.said

    def grade(self, task: Task, transcript: Transcript) -> Grade:
        """The server's reward, scaled to [0, 1]; raises `NotGradable` when it gives none, fails, or
        says something else than in the transcript."""
        texts = [turn.text for turn in transcript.turns if turn.kind == "model"]
        if not transcript.finished:
            texts.pop()  # the server never saw it
        try:
            return self._grade_of(self._steps(task.data["index"], texts), transcript)
        except UserError as error:
            raise NotGradable(str(error)) from error

    def _steps(self, seed: int, texts: Sequence[str]) -> list[Stepped]:
        if (known := self._over.get((seed, tuple(texts)))) is not None:
            return known
        state = _Played(seed)
        for text in texts:
            state.texts.append(text)
            if self._advanced(state).is_over:
                break
        self._sessions.release(state)
        return state.steps

    def _grade_of(self, steps: Sequence[Stepped], transcript: Transcript) -> Grade:
        said = [turn.text for turn in transcript.turns if turn.kind == "environment"]
        for step, text in zip(steps, said, strict=False):
            contents = [each.content.strip() for each in messages_of(step.said)]
            if step.is_over or any(each not in text for each in contents):
                raise UserError(
                    f"server {self.options.server!r} says something else when the episode is "
                    "played again, so that it cannot be graded"
                )
        rewards = [step.reward for step in steps if step.reward is not None]
        if not rewards and steps:
            raise UserError(f"server {self.options.server!r} gives no reward for this episode")
        reward = self.options.reward_low
        if rewards:
            counts = {"last": rewards[-1], "sum": sum(rewards), "max": max(rewards)}
            reward = counts[self.options.reward]
        scaled = self.options.scaled(reward, f"server {self.options.server!r}")
        return Grade(scaled, {"turns": float(len(steps))})

    def _connected(self) -> Connection:
        definition = self._sessions.definition
        had_program = self._program is not None
        if definition.command and self._program is None:
            self._program, self._url = Program.listening(definition)
        url = f"{self._url.rstrip('/').removesuffix('/ws')}/ws"
        try:
            return Connection(WebSocket(url, definition, self._sessions.deadline()))
        except Gone:
            if self._program is not None:
                self._program.end()
                self._program = None
            if not had_program:
                raise
            return self._connected()

    def _task(self, seed: int) -> Task:
        def drawn(session: Connection, _: bool) -> Task:
            given = {**self._begun(session, seed), "seed": seed}
            prompt, answer = self._shown(given, self.options.task, "task"), ""
            if self.options.answer:
                answer = str(self._shown(given, self.options.answer, "answer"))
            return Task(prompt, answer, {"index": seed})

        episode = object()
        task = self._sessions.ask(episode, drawn)
        self._sessions.release(episode)
        return task

    def _begun(self, session: Connection, seed: int) -> Row:
        return session.reset({**self._reset, "seed": seed}, self._sessions.deadline())

    def _advanced(self, state: _Played) -> Stepped:
        """Play the last of an episode's turns, and those before it if its session is another."""

        def played(session: Connection, is_own: bool) -> Stepped:
            if not is_own:
                self._begun(session, state.seed)
                for text, before in zip(state.texts[:-1], state.steps, strict=True):
                    if self._stepped(session, text) != before:
                        raise ServerError("gives other turns when an episode is played again")
            return self._stepped(session, state.texts[-1])

        state.steps.append(self._sessions.ask(state, played))
        return state.steps[-1]

    def _stepped(self, session: Connection, text: str) -> Stepped:
        try:
            given = session.step(self._action(text), self._sessions.deadline())
        except ValueError as error:
            return Stepped(f"error: {error}", None, False)
        except Refused as refused:
            if refused.code != REFUSED or self.options.action:
                raise
            return Stepped(f"error: {refused.told!s:.300}", None, False)
        said = self._shown(given, self.options.observation, "observation")
        return Stepped(said, given["reward"], given["done"])

    def _action(self, text: str) -> Row:
        """The action of a turn; raises `ValueError`."""
        if self.options.action:
            return {self.options.action: text}
        try:
            found = msgspec.json.decode(text)
        except DECODE_ERRORS:
            found = None
        if not isinstance(found, dict):
            raise ValueError("write one JSON object")
        return found

    def _shown(self, given: Row, form: str, option: str) -> Observation:
        """What the model sees of a message; raises `ServerError`."""
        shown = dict(given["observation"])
        metadata = shown.pop("metadata", None) or given.get("metadata")
        if not form:
            texts = [each for each in shown.values() if each not in (None, "")]
            if len(texts) == 1 and isinstance(texts[0], str):
                return texts[0]
            return json.dumps(shown, ensure_ascii=False)
        try:
            names = FIELD.findall(form)
            shown |= {"metadata": metadata, "seed": given.get("seed")}
            row = {name: value_of(shown, name) for name in names}
            if FIELD.fullmatch(form) and isinstance(row[names[0]], list):
                return messages_of(prompt_in(row, names[0], f"its {option}"))
            return FIELD.sub(lambda name: text_in(row, name.group(1), f"its {option}"), form)
        except (ValueError, UserError) as error:
            raise ServerError(f"does not fit the option {option}: {error}") from error
