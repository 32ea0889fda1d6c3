"""One judge of this machine: known scores first, then the judge itself, within its bounds."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Protocol, TypeVar

from peers.environments.interface import NotGradable, Task, Transcript, as_text
from peers.environments.judges.definition import Access, Definition, read_definition
from peers.environments.judges.known import Known
from peers.environments.judges.remote import Remote
from swarm.rollouts.seeds import digest
from swarm.world.progress import REPORT_SECONDS, checkpoint

T = TypeVar("T")

DECIMALS = 4
"""Rewards are rounded to so many: machines differ in a float's last bits."""

FIELD = re.compile(r"\{(task|answer|completion|transcript)\}")


@dataclass(frozen=True)
class JudgeLimits:
    """What a rollout step may cost; 0: no bound."""

    calls: int = 0
    tokens: int = 0


class Scorer(Protocol):
    """What scores a text."""

    def score(self, text: str) -> tuple[float, int]:
        """(score, tokens used); raises `NotGradable` or `UserError`."""
        ...


@dataclass(frozen=True)
class Judge:
    """A judge that is ready to score."""

    name: str
    definition: Definition
    known: Known
    scorer: Scorer
    limits: JudgeLimits

    @classmethod
    def open(cls, name: str, wanted_hash: str, limits: JudgeLimits) -> Judge:
        """The judge NAME of this machine; raises `UserError`, `NotGradable` for another hash."""
        definition, access, path = read_definition(name)
        found = definition.digest().hex()
        if wanted_hash and found != wanted_hash:
            raise NotGradable(
                f"judge {name!r} is another one than the run's: {path} has the hash {found}, and "
                f"judge_hash is {wanted_hash}; use the run owner's file"
            )
        cache = Path(access.cache).expanduser() if access.cache else path.with_suffix(".sqlite")
        known = Known(cache, access.cache_entries)
        return cls(name, definition, known, make_scorer(definition, access, name), limits)

    def score(self, task: Task, transcript: Transcript, step: int) -> float:
        """The reward in [0, 1]; raises `NotGradable` and `UserError`."""
        own = self.definition.digest()
        fields = {
            "task": as_text(task.prompt),
            "answer": task.answer,
            "completion": transcript.text,
            "transcript": "\n".join(f"{turn.kind}: {turn.text}" for turn in transcript.turns),
        }
        key = digest("swarm/1/judged", own, *(text.encode() for text in fields.values()))
        score = self.known.score(key)
        if score is not None:
            return score
        reached = self.known.spend(own, step, self.limits.calls, self.limits.tokens)
        if reached:
            raise NotGradable(f"judge {self.name!r}: {reached} are the most allowed")
        text = FIELD.sub(lambda field: fields[field[1]], self.definition.prompt)
        given, tokens = _patiently(partial(self.scorer.score, text))
        self.known.add_tokens(own, step, tokens)
        return self.known.add(key, self._reward(given))

    def _reward(self, score: float) -> float:
        low, high = self.definition.low, self.definition.high
        if not math.isfinite(score) or not low <= score <= high:
            raise NotGradable(
                f"judge {self.name!r} gives the score {score:g}; it must lie between {low:g} and "
                f"{high:g}"
            )
        return round((score - low) / (high - low), DECIMALS)


def _patiently(work: Callable[[], T]) -> T:
    """The result of work in another thread, with reports of progress meanwhile.

    Without them a validator would take its grading process for dead while a judge thinks. When the
    job is cancelled, the work goes on until its own deadline.
    """
    found: Future[T] = Future()

    def run() -> None:
        try:
            found.set_result(work())
        except BaseException as error:
            found.set_exception(error)

    Thread(target=run, name="judge", daemon=True).start()
    while not wait([found], REPORT_SECONDS).done:
        checkpoint()
    return found.result()


def make_scorer(definition: Definition, access: Access, name: str) -> Scorer:
    """What scores for a definition; raises `UserError`."""
    if definition.kind == "openai":
        return Remote(definition, access, name)
    from peers.environments.judges.classifier import Classifier

    return Classifier(definition, access, name)
