"""The environment `harness`: tasks of a data set, played by a program that the lab has."""

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from blake3 import blake3
from msgspec import Meta

from peers.endpoint.harness.run import Answered, Ended, HarnessError, Program, Run, Said
from peers.endpoint.harness.server import Server
from peers.endpoint.tools import FORMS
from peers.environments.dataset import DataOptions, OfRows
from peers.environments.interface import (
    Conversation,
    Episodes,
    Grade,
    NotGradable,
    Task,
    Tasks,
    Transcript,
    messages_of,
)
from peers.environments.play import Observation
from peers.environments.rows import located
from peers.environments.tasks import Generated
from swarm.errors import UserError
from swarm.wire.manifest import OptionValue

CALL_GRACE_SECONDS = 10.0
"""Time beyond the option `seconds` to kill an overdue harness and say so."""

PROMPTS_KEPT = 1 << 16
"""First requests that are remembered, each of some thousand characters."""


class HarnessOptions(DataOptions, frozen=True, kw_only=True):
    """Which program plays, and what it may use (docs/endpoint.md)."""

    program: Annotated[str, Meta(min_length=1, max_length=1000)]
    program_hash: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")] | None = None
    arguments: Annotated[list[Annotated[str, Meta(max_length=1000)]], Meta(max_length=32)] = (
        msgspec.field(default_factory=list)
    )
    sampling: Literal["refuse", "ignore"] = "refuse"
    calls: Literal["none", "hermes", "mistral", "llama"] = "none"
    seconds: Annotated[float, Meta(gt=0, le=3600)] = 25.0
    processes: Annotated[int, Meta(ge=1, le=4096)] = 64
    cut_reward: Annotated[float, Meta(ge=0, le=1)] = 0.0


@dataclass
class _Played:
    """The state of an episode."""

    row: int
    turns: tuple[Answered, ...] = ()
    run: Run | None = None
    """Its process, unless it was needed for another episode."""


@dataclass(eq=False)
class _Runs:
    """Harnesses that wait for the model, in the order of their last use."""

    server: Server
    most: int
    _held: list[Run] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, fits: Callable[[Run], bool]) -> Run | None:
        with self._lock:
            found = next(filter(fits, self._held), None)
            if found is not None:
                self._held.remove(found)
        return found

    def hold(self, run: Run) -> None:
        """Keep a run for its next turn, or for its grade."""
        with self._lock:
            self._held.append(run)
            oldest = self._held.pop(0) if len(self._held) > self.most else None
        if oldest is not None:
            self.close(oldest)

    def close(self, run: Run) -> None:
        """End a run."""
        self.server.runs.pop(run.key, None)
        run.close()

    def close_all(self) -> None:
        for run in self._held:
            self.close(run)
        self.server.close()


class Harness(OfRows, Episodes):
    """Plays each episode in a process of its own, again where this process does not hold it."""

    name = "harness"
    version = "1"
    replayable = False
    Options = HarnessOptions
    options: HarnessOptions

    def __init__(self, options: HarnessOptions) -> None:
        """Open the data and check the program; raises `UserError`."""
        super().__init__(options)
        path = located(options.program, "program", "program_hash")
        self._command = self._checked(path.resolve())
        self.call_seconds = options.seconds + CALL_GRACE_SECONDS
        self._form = FORMS.get(options.calls)
        self._prompts: dict[int, Said] = {}

    def pins(self) -> Mapping[str, OptionValue]:
        """The hashes of the data and of the program."""
        return {"hash": self.rows.hash(), "program_hash": self._hash}

    def tasks(self) -> Tasks:
        """The rows. A failure is the program's, not a row's, so that no other row is drawn."""
        indices = self.indices
        # 256 bits modulo the number of rows favour none measurably.
        return Generated(
            lambda raw: self.task_of_row(indices[int.from_bytes(raw, "big") % len(indices)])
        )

    def task_of_row(self, index: int) -> Task:
        """The task whose prompt is the harness's first request; raises `UserError`."""
        prompt = self._prompts.get(index)
        if prompt is None:
            run = self._reached(index, (), time.monotonic() + self.options.seconds)
            prompt = run.prompts[0]
            self._runs.hold(run)
            if len(self._prompts) >= PROMPTS_KEPT:
                self._prompts.clear()
            self._prompts[index] = prompt
        is_plain = isinstance(prompt, Conversation) and not prompt.variables
        return Task(messages_of(prompt) if is_plain else prompt, "", {"row": index})

    def start(self, task: Task) -> _Played:
        return _Played(task.data["row"])

    def step(self, state: _Played, text: str) -> Observation | None:
        """What the harness says next; raises `UserError` when it fails."""
        own = state.run
        held = self._runs.take(
            lambda run: run is own or (own is None and run.row == state.row and not run.turns)
        )
        state.turns = (*state.turns, Answered(text, "stop"))
        deadline = time.monotonic() + self.options.seconds
        state.run = run = self._reached(state.row, state.turns, deadline, held)
        self._runs.hold(run)
        if run.ended is not None:
            return None
        return run.added(len(run.turns), self._form)

    def grade(self, task: Task, transcript: Transcript) -> Grade:
        """Raises `NotGradable` without a posted reward, or if another is said when played again."""
        texts = [turn.text for turn in transcript.turns if turn.kind == "model"]
        turns = [Answered(text, "stop") for text in texts]
        if not transcript.finished:
            turns[-1] = Answered(texts[-1], "length")
        deadline = time.monotonic() + self.options.seconds
        try:
            row, played = task.data["row"], tuple(turns)
            run = self._reached(row, played, deadline, self._held(row, played, transcript))
            try:
                self._check_observations(run, transcript)
                was_cut = run.ended is None or not transcript.finished
                ended = run.finish(deadline)
            finally:
                self._runs.close(run)
        except (HarnessError, UserError) as error:
            raise NotGradable(str(error)) from error
        return self._grade_of(ended, was_cut)

    def _held(self, row: int, turns: tuple[Answered, ...], transcript: Transcript) -> Run | None:
        """The run that played an episode, whose last turn it may not have got."""

        def fits(run: Run) -> bool:
            if run.row != row or run.turns not in (turns, turns[:-1]):
                return False
            try:
                self._check_observations(run, transcript)
            except HarnessError:
                return False
            return True

        return self._runs.take(fits)

    def _check_observations(self, run: Run, transcript: Transcript) -> None:
        """Raise `HarnessError` unless the run said what the transcript has."""
        said = [turn.text for turn in transcript.turns if turn.kind == "environment"]
        for index, text in enumerate(said[: len(run.prompts) - 1]):
            new = run.added(index + 1, self._form)
            contents = [new] if isinstance(new, str) else [message.content for message in new]
            if any(each.strip() not in text for each in contents):
                raise HarnessError(
                    "it says something else when the episode is played again, so that another "
                    "process cannot grade it"
                )

    def _grade_of(self, ended: Ended, was_cut: bool) -> Grade:
        if ended.reward is not None:
            return Grade(ended.reward, ended.parts)
        if was_cut:
            return Grade(self.options.cut_reward)
        raise NotGradable(
            f"the harness {self.options.program} posted no reward ({ended.words}); post one to "
            "$OPENAI_BASE_URL/rollouts/NAME/reward in every case"
        )

    def _reached(
        self, row: int, turns: tuple[Answered, ...], deadline: float, run: Run | None = None
    ) -> Run:
        """A run of a row that got these answers: `run`, which got the first, or a new one."""
        try:
            if run is None:
                run = Run(self._program, row, self.rows.row(row))
                self._server.runs[run.key] = run
                run.begin(deadline)
                self._check_prompt(run)
            for given in turns[len(run.turns) :]:
                run.answer(given, deadline, self._form)
        except BaseException as error:
            if run is not None:
                self._runs.close(run)
            if isinstance(error, HarnessError):
                raise UserError(
                    f"the harness {self.options.program} cannot play row {row} of "
                    f"{self.options.path}: {error}"
                ) from error
            raise
        return run

    def _check_prompt(self, run: Run) -> None:
        """Raise `HarnessError` for a task that has two prompts."""
        known = self._prompts.get(run.row)
        if known is not None and known != run.prompts[0]:
            raise HarnessError(
                "its first request differs from that of another process; it must follow from the "
                "task alone"
            )

    @cached_property
    def _server(self) -> Server:
        return Server(self.options.sampling == "ignore", self._form)

    @cached_property
    def _runs(self) -> _Runs:
        runs = _Runs(self._server, self.options.processes)
        weakref.finalize(self, runs.close_all)
        return runs

    @cached_property
    def _program(self) -> Program:
        return Program(self._command, self._server.url)

    def _checked(self, path: Path) -> list[str]:
        """The command that starts the program; raises `UserError`."""
        try:
            self._hash = blake3(path.read_bytes()).hexdigest()
        except OSError as error:
            raise UserError(f"{self.where}: program {path} cannot be read ({error})") from error
        wanted = self.options.program_hash
        if wanted is not None and wanted != self._hash:
            raise UserError(
                f"{self.where}: program {path} has the hash {self._hash}, but program_hash is "
                f"{wanted}; get the program that the run was created with"
            )
        if os.access(path, os.X_OK):
            return [str(path), *self.options.arguments]
        if path.suffix != ".py":
            raise UserError(
                f"{self.where}: program {path} is neither executable nor a Python program (.py); "
                f"type: chmod +x {path}"
            )
        return [sys.executable, str(path), *self.options.arguments]
