"""Where solutions come from: samples of a teacher on this machine, or the rollouts of a run."""

import platform
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache, partial
from itertools import pairwise, takewhile
from typing import Any

from blake3 import blake3
from msgspec.structs import asdict

from peers.environments import Renderer, Task
from peers.environments.interface import Message
from peers.environments.registry import load_named
from peers.environments.tasks import indexed
from peers.evaluation.run import Evaluation, Measured
from peers.evaluation.tasks import tasks_of
from peers.models.find import Model
from peers.synthesis.responses import response
from peers.synthesis.write import Solution
from swarm.errors import UserError
from swarm.jobs.evaluation import Sample
from swarm.look.rollouts.seen import SeenRollout, Turn, as_row
from swarm.wire.manifest import RunManifest

# The messages of rollouts, which hold tokens only: a chat template read backwards.
#
# A candidate is cut out of the decoded text. It counts only if rendering it gives the same tokens.

PROMPTS = (("user",), ("system", "user"))
"""Roles of the prompts that are recognised."""

OBSERVATIONS = (("user",), ("tool",))
"""Roles of what an environment says between the model's turns."""

MARKS = ("16180339887498948482", "27182818284590452353")
"""Stand for the contents; every tokenizer gives digits back as they were."""

Render = Callable[[tuple[Message, ...]], list[int]]


class ChatReader:
    """Reads messages with the tokenizer and the chat template of a model folder."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        self._pattern = cache(self._make_pattern)

    def messages(self, turns: Sequence[Turn]) -> list[dict[str, str]] | None:
        """The chat of a rollout; None if its prompt is no chat, or not of a form known here."""
        try:
            found = self._read(PROMPTS, self._renderer.encode_prompt, turns[0].tokens)
            prompt = found
            for before, turn in pairwise(turns):
                if found is None or prompt is None:
                    return None
                if turn.kind == "model":
                    found = (*found, Message("assistant", self.written(turn)))
                    continue
                said = self._observed(prompt, before.tokens[-1], turn.tokens)
                found = None if said is None else (*found, *said)
        except (UserError, ValueError):  # no chat template, or one that refuses these messages
            return None
        return None if found is None else [each.fields() for each in found]

    def written(self, turn: Turn) -> str:
        """What the model wrote, without the token that ended its turn."""
        tokens = turn.tokens[:-1] if turn.finish == "stop" else turn.tokens
        return self._renderer.decode_completion(tokens, ())[0]

    def _observed(
        self, prompt: tuple[Message, ...], last: int, tokens: Sequence[int]
    ) -> tuple[Message, ...] | None:
        def render(messages: tuple[Message, ...]) -> list[int]:
            return self._renderer.encode_observation(prompt, messages, last)

        return self._read(OBSERVATIONS, render, tokens)

    def _read(
        self, forms: Sequence[tuple[str, ...]], render: Render, tokens: Sequence[int]
    ) -> tuple[Message, ...] | None:
        """The messages that `render` turns into these tokens."""
        text = self._renderer.decode_completion(tokens, ())[0]
        for roles in forms:
            marked = tuple(map(Message, roles, MARKS))
            try:
                pattern = self._pattern(tuple(render(marked)))
            except UserError:
                continue  # such as a template without system messages
            if (found := pattern.fullmatch(text)) is None:
                continue
            messages = tuple(map(Message, roles, found.groups()))
            if len(found.groups()) == len(roles) and render(messages) == list(tokens):
                return messages
        return None

    def _make_pattern(self, tokens: tuple[int, ...]) -> re.Pattern[str]:
        """What the text of marked messages looks like with any contents."""
        pattern = re.escape(self._renderer.decode_completion(tokens, ())[0])
        for mark in MARKS:
            pattern = pattern.replace(mark, "(.*?)", 1)
        return re.compile(pattern, re.DOTALL)


def of_samples(measured: Measured, wanted: Evaluation, teacher: Model) -> Iterator[Solution]:
    """The samples of a teacher, by environment, task and number; raises `UserError`."""
    settings = {key: getattr(wanted, key) for key in ("temperature", "seed")}
    made = {
        "model_name": f"{teacher.title}@{measured.drawn.checkpoint[:16]}",
        "generation_config": {**settings, "max_new_tokens": measured.drawn.max_new_tokens},
        "machine_info": {"system": platform.system(), "machine": platform.machine()},
    }
    named = zip(wanted.environments, wanted.labels, strict=True)
    drawn = zip(named, tasks_of(wanted, teacher.folder), measured.samples, strict=True)
    for (reference, label), tasks, found in drawn:
        for index, ((seed, task), samples) in enumerate(zip(tasks, found, strict=True)):
            for sample in samples:
                if sample.problem:
                    continue
                name = f"{label}-{seed.hex()[:16]}"
                record = response(
                    task,
                    label,
                    name,
                    sample=f"{name}/{sample.row}",
                    text="".join(sample.turns[1:]),
                    score=sample.reward,
                    parts=sample.parts,
                    made=made,
                )
                yield Solution(
                    task=(label, index),
                    prompt=sample.turns[0],
                    text="".join(sample.turns[1::2]),
                    tokens=sample.tokens,
                    reward=sample.reward,
                    finished=sample.finished,
                    kind=record["task_type"],
                    contributor="",
                    row={
                        **record,
                        "messages": _messages(sample, label),
                        "environment": reference.name,
                        "environment_version": reference.version,
                        "tokens": sample.tokens,
                    },
                )


def _messages(sample: Sample, environment: str) -> list[dict[str, str]] | None:
    """The chat of a sample; None after a prompt of text. Raises `UserError` for turns after one."""
    turns = sample.turns[1:]
    if sample.prompt[0].role:
        roles = [("assistant", "user")[at % 2] for at in range(len(turns))]
        asked = [{"role": each.role, "content": each.content} for each in sample.prompt]
        said = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]
        return asked + said
    if len(turns) > 1:
        raise UserError(
            f"environment {environment!r} answers the teacher's turns after a prompt of text, "
            "which no prompt with an answer can hold; give it --option chat=true and a teacher "
            "with a chat template"
        )
    return None


class RunTasks:
    """Finds tasks by their prompts' tokens, in the run's finite environments that may be built."""

    def __init__(self, manifest: RunManifest | None, renderer: Renderer) -> None:
        self.chats = ChatReader(renderer)
        self._settings = {} if manifest is None else asdict(manifest.sampling)
        self._known: dict[bytes, Callable[[], Task]] = {}
        self.problems: list[str] = []
        """A sentence for each environment that cannot be built here."""
        for reference in () if manifest is None else manifest.environments:
            try:
                tasks = indexed(load_named(reference).cached_tasks)
            except UserError as error:
                self.problems.append(f"{error}; the records lack verification_info")
                continue
            for task in [partial(tasks.at, each) for each in range(tasks.count)] if tasks else ():
                with suppress(UserError, ValueError):  # an unusable row
                    self._known[_prompt_id(renderer.encode_prompt(task().prompt))] = task

    def record(self, seen: SeenRollout, messages: Any, text: str) -> dict[str, Any]:
        """The record of a rollout and what the model and the environment wrote."""
        origin, prompt = seen.origin, _prompt_id(seen.turns[0].tokens)
        if prompt in self._known:
            task = self._known[prompt]()
        else:
            asked = takewhile(lambda each: each["role"] != "assistant", messages or ())
            task = Task(tuple(Message(**each) for each in asked) or seen.turns[0].text or "", "")
        return response(
            task,
            seen.environment,
            f"{seen.environment}-{prompt.hex()}",
            sample=f"{origin.submission}/{seen.group}/{seen.sample}",
            text=text,
            score=seen.reward or 0.0,
            parts=seen.parts,
            made={
                "model_name": f"{origin.run}@{origin.lineage}-{origin.policy}",
                "generation_config": self._settings
                | ({"temperature": seen.temperature} if seen.temperature else {}),
                "machine_info": {"worker": origin.worker, "engine": origin.engine},
            },
        )


def _prompt_id(tokens: Sequence[int]) -> bytes:
    return blake3(array("I", tokens).tobytes()).digest(8)


def of_rollouts(rollouts: Iterator[SeenRollout], tasks: RunTasks | None) -> Iterator[Solution]:
    """The accepted rollouts of a run; raises `UserError` without `tasks`, which reads the texts."""
    for seen in rollouts:
        if seen.origin.verdict != "accepted" or seen.reward is None:
            continue
        if tasks is None:
            raise UserError(
                "the rollouts have token ids only, because no checkpoint of the run is beside "
                "them; give --tokenizer FOLDER"
            )
        texts = [
            tasks.chats.written(turn) if turn.kind == "model" else turn.text or ""
            for turn in seen.turns[1:]
        ]
        messages = tasks.chats.messages(seen.turns)
        record = tasks.record(seen, messages, "".join(texts))
        yield Solution(
            task=(seen.environment, tuple(seen.turns[0].tokens)),
            prompt=seen.turns[0].text or "",
            text="".join(texts[::2]),
            tokens=seen.model_tokens,
            reward=seen.reward,
            finished=seen.turns[-1].finish == "stop",
            kind=record["task_type"],
            contributor=seen.origin.worker,
            row={**record, **as_row(seen), "messages": messages},
        )
