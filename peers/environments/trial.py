"""The service of `swarm environment check`, in a child process: it calls an environment's code."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import blake3
import msgspec

from peers.environments.interface import NotGradable, Split, Task, Transcript, as_text, episodes_of
from peers.environments.play import Episode, described, graded_alike, task_of
from peers.environments.probe import probe_hash
from peers.environments.prompt_room import PromptRoom
from peers.environments.registry import load_any
from peers.environments.renderer import Renderer
from peers.environments.row_check import first_rows
from peers.environments.tasks import SPLITS
from swarm.errors import UserError
from swarm.jobs.environment import TrialService, TrialSetup, Tried, TryEnvironment
from swarm.rollouts.seeds import digest
from swarm.terminal.options import UNGRADABLE_MAX
from swarm.world.progress import checkpoint
from swarm.world.tasks import JobThread, in_job_thread

MARK = " is not gradable: "
"""Words of the warning about the first such completion of a task."""

TURNS_TRIED = 4
"""Turns of junk in one episode."""

JUNK = {
    "empty text": "",
    "a space": " ",
    "control characters": "\n\x00\ufffd\u202e",
    "a long word": "x" * 100_000,
    "a huge number": "9" * 10_000,
    "nested braces": "{" * 5_000,
    "nested boxes": "\\boxed{" * 1_000,
    "a tower of powers": "9**9**9**9",
    "no number": "NaN",
    "emoji": "\U0001f642" * 500,
}
"""Completions that any policy may write, by what they are."""


class Trial:
    """Implements `swarm.jobs.environment.TrialService`."""

    def __init__(self, setup: TrialSetup) -> None:
        self._environment = load_any(setup.environment, setup.options)
        self._renderer = Renderer(Path(setup.model)) if setup.model else None
        self._room = PromptRoom(self._renderer) if self._renderer is not None else None
        self._thread = JobThread()

    @in_job_thread
    def play(self, job: TryEnvironment) -> Tried:
        found = Tried(
            version=self._environment.version,
            several_turns=episodes_of(self._environment) is not None,
        )
        try:
            self._draw(job.tasks, found)
            if not found.faults:
                self._grade(job.graded, found)
        except UserError as error:
            found.faults.append(str(error))
        return found

    def _draw(self, tasks: int, found: Tried) -> None:
        prompts = dict[Split, set[str]]((split, set()) for split in SPLITS)
        for number, split in ((n, s) for s in SPLITS for n in range(tasks)):
            checkpoint()
            task = self._task(number, split)
            prompts[split].add(as_text(task.prompt))
            found.answers.append((f"{split} task {number}", _digest(task)))
            if split == "train" and self._renderer is not None:
                found.prompt_tokens.append(len(self._renderer.encode_prompt(task.prompt)))
                found.answer_tokens.append(len(self._renderer.encode_completion(task.answer)))
        found.different = len(prompts["train"])
        if both := sorted(prompts["train"] & prompts["held_out"]):
            found.faults.append(
                f"environment {self._environment.name!r} draws the prompt {both[0]:.60} as a "
                "training task and as a held-out one; use the Tasks of peers.environments, which "
                "split by the prompt"
            )
        if self._renderer is not None:
            found.probe_hash = probe_hash(self._environment, self._renderer).hex()
        rows = first_rows(self._environment, self._room)
        if rows is not None and rows.unusable_count:
            too_many = rows.faults > UNGRADABLE_MAX * rows.rows
            said = rows.listed(self._environment.name)
            (found.faults if too_many else found.warnings).append(said)

    def _task(self, number: int, split: Split = "train") -> Task:
        seed = digest("swarm/1/trial", number.to_bytes(4, "big"))
        return task_of(self._environment, seed, split, room=self._room)

    def _grade(self, tasks: int, found: Tried) -> None:
        for number in range(tasks):
            task = self._task(number)
            with _noting(found, f"task {number}, its answer", task):
                self._grade_answer(number, task, found)
            for junk, text in self._junk(number, task):
                with _noting(found, f"task {number}, {junk}", task):
                    self._grade_junk(f"task {number}, {junk}", task, text, found)

    def _junk(self, number: int, task: Task) -> Iterator[tuple[str, str]]:
        yield from JUNK.items()
        yield "the prompt", as_text(task.prompt)
        other = self._task(number + 1)
        if other.answer != task.answer:
            yield "another task's answer", other.answer

    def _grade_answer(self, number: int, task: Task, found: Tried) -> None:
        texts = task.own.model_turns
        if not any(texts):
            return
        episode, said = Episode(self._environment, task), list[str]()
        for at, text in enumerate(texts[:-1]):
            observation = self._stepped(f"task {number}, turn {at}", episode, text, found)
            if observation is None:
                found.faults.append(
                    f"environment {self._environment.name!r} ends the episode after {text!r:.60}, "
                    "but the task's demonstration goes on; make it and `step` agree"
                )
                return
            said += [text, observation]
        transcript = Transcript.of(*said, texts[-1])
        reward = self._graded(f"task {number}, its answer", task, transcript, found)
        if reward is not None:
            found.answer_rewards.append(reward)

    def _grade_junk(self, what: str, task: Task, text: str, found: Tried) -> None:
        for finished in (True, False):
            transcript = Transcript.of(text, finished=finished)
            reward = self._graded(f"{what}, {finished}", task, transcript, found)
            if reward is not None:
                found.junk_rewards.append(reward)
                if reward >= 1:
                    shown = "finished" if finished else "cut at the token limit"
                    found.warnings.append(f"junk earns the full reward: {what} ({shown})")
        episode = Episode(self._environment, task)
        for turn in range(TURNS_TRIED if episodes_of(self._environment) is not None else 0):
            if self._stepped(f"{what}, turn {turn}", episode, text, found) is None:
                break

    def _graded(self, what: str, task: Task, transcript: Transcript, found: Tried) -> float | None:
        checkpoint()
        with _noting(found, what, task):
            given = graded_alike(self._environment, task, transcript)
            found.parts = sorted({*found.parts, *given.parts})
            found.answers.append((f"the reward of {what}", f"{given.reward!r}"))
            return given.reward
        return None

    def _stepped(self, what: str, episode: Episode, text: str, found: Tried) -> str | None:
        checkpoint()
        observation = episode.step(text)
        shown = None if observation is None else as_text(observation)
        found.answers.append((f"the observation of {what}", f"{shown!r}"))
        return shown


_SERVICE: type[TrialService] = Trial


@contextmanager
def _noting(found: Tried, what: str, task: Task) -> Iterator[None]:
    """Count a text that is not gradable, and go on after the block."""
    try:
        yield
    except NotGradable as error:
        found.not_gradable += 1
        number = what.partition(",")[0]
        if not any(each.startswith(f"{number}, ") and MARK in each for each in found.warnings):
            found.warnings.append(f"{what} (prompt {as_text(task.prompt)[:60]!r}){MARK}{error}")


def _digest(task: Task) -> str:
    try:
        raw = msgspec.json.encode((task.prompt, task.answer, json.dumps(task.data, sort_keys=True)))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"a task's data is {task.data!r:.100}, which is not JSON ({described(error)}); use "
            "numbers, text, lists and dictionaries"
        ) from error
    return blake3.blake3(raw).hexdigest(length=8)
