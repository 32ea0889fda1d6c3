"""Where solutions come from: samples of a teacher on this machine, or the rollouts of a run."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from peers.evaluation.run import Measured
from peers.synthesis.chats import ChatReader
from peers.synthesis.selection import Solution
from swarm.errors import UserError
from swarm.jobs.evaluation import Sample
from swarm.look.rollouts.seen import SeenRollout, as_row
from swarm.wire.manifest import EnvironmentReference


def of_samples(
    measured: Measured, environments: Sequence[EnvironmentReference]
) -> Iterator[Solution]:
    """The samples of a teacher, by environment, task and number; raises `UserError`."""
    for reference, tasks in zip(environments, measured.samples, strict=True):
        for index, samples in enumerate(tasks):
            for number, sample in enumerate(samples):
                if sample.problem:
                    print(f"warning: left out: {sample.problem}", file=sys.stderr)
                    continue
                yield Solution(
                    task=(reference.name, index),
                    prompt=sample.turns[0],
                    text="".join(sample.turns[1::2]),
                    tokens=sample.tokens,
                    reward=sample.reward,
                    finished=sample.finished,
                    contributor="",
                    row={
                        **_texts(sample, reference.name),
                        "environment": reference.name,
                        "environment_version": reference.version,
                        "task": index,
                        "sample": number,
                        "reward": sample.reward,
                        "tokens": sample.tokens,
                        "teacher": measured.drawn.checkpoint,
                    },
                )


def _texts(sample: Sample, environment: str) -> dict[str, Any]:
    """Prompt and answer, or messages; raises `UserError` for turns that are neither."""
    first = sample.prompt[0]
    turns = sample.turns[1:]
    if first.role:
        roles = [("assistant", "user")[at % 2] for at in range(len(turns))]
        asked = [{"role": each.role, "content": each.content} for each in sample.prompt]
        said = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=True)]
        return {"prompt": None, "answer": None, "messages": asked + said}
    if len(turns) > 1:
        raise UserError(
            f"environment {environment!r} answers the teacher's turns after a prompt of text, "
            "which no prompt with an answer can hold; give it --option chat=true and a teacher "
            "with a chat template"
        )
    return {"prompt": first.content, "answer": turns[0], "messages": None}


def of_rollouts(rollouts: Iterator[SeenRollout], chats: ChatReader | None) -> Iterator[Solution]:
    """The accepted rollouts of a run; raises `UserError` for some without a text.

    `chats` reads the messages of those whose prompt is a chat.
    """
    for seen in rollouts:
        if seen.submission.verdict != "accepted" or seen.reward is None:
            continue
        if any(turn.text is None for turn in seen.turns):
            raise UserError(
                "the rollouts have token ids only, because no checkpoint of the run is beside "
                "them; give --tokenizer FOLDER"
            )
        written = [turn for turn in seen.turns if turn.kind == "model"]
        yield Solution(
            task=(seen.environment, tuple(seen.turns[0].tokens)),
            prompt=seen.turns[0].text or "",
            text="".join(turn.text or "" for turn in written),
            tokens=seen.model_tokens,
            reward=seen.reward if seen.task_reward is None else seen.task_reward,
            finished=written[-1].finish == "stop",
            contributor=seen.submission.worker,
            row={**as_row(seen), "messages": chats.messages(seen.turns) if chats else None},
        )
