"""Which solutions `swarm synthesize` keeps, and their Parquet in a Hugging Face folder."""

import math
import re
import shutil
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from blake3 import blake3

from peers.dataset.similar import Texts, shingles, similarity
from peers.synthesis.responses import MEANINGS
from swarm.errors import UserError
from swarm.look.rollouts.export import COLUMNS, Table, write_card, write_parquet
from swarm.look.rollouts.filters import Range
from swarm.terminal.output import to_json
from swarm.terminal.untrusted import printable


@dataclass(frozen=True)
class Solution:
    """One finished episode of a task."""

    task: Hashable
    """What all solutions of a task share."""
    prompt: str
    text: str
    """All that the model wrote."""
    tokens: int
    reward: float
    finished: bool
    """Whether it ended with a stop token."""
    kind: str
    """Kind of task."""
    contributor: str
    """Peer id of the worker; empty: this machine."""
    row: dict[str, Any]
    """What is written if it is kept."""


@dataclass(frozen=True)
class Rules:
    """A solution must satisfy all of them."""

    reward: Range
    tokens: Range
    unfinished: bool
    """Whether solutions that ran into the length limit may be kept."""
    per_task: int
    """Most solutions of one task."""
    similarity: float
    """Largest share of runs of words in common with a kept solution of the same task."""
    question_similarity: float = 1.0
    """Largest share of runs of words in common with the prompt of another kept task."""

    def described(self) -> str:
        """The rules as options."""
        return (
            f"--reward {_shown(self.reward)} --tokens {_shown(self.tokens)} "
            f"{'--unfinished ' if self.unfinished else ''}"
            f"--per-task {self.per_task} --similarity {self.similarity:g} "
            f"--question-similarity {self.question_similarity:g}"
        )


@dataclass
class Credit:
    """What one contributor gave, or what one kind of task has."""

    solutions: int = 0
    kept: int = 0
    kept_tokens: int = 0


@dataclass
class Selection:
    """Selects solutions, earlier ones first; holds 8 bytes for each of their runs of words."""

    rules: Rules
    left_out: Counter[str] = field(default_factory=Counter)
    """Solutions by the reason why they were left out."""
    credits: dict[str, Credit] = field(default_factory=dict)
    """By contributor."""
    kinds: dict[str, Credit] = field(default_factory=dict)
    """By kind of task."""
    tasks: int = 0
    """Tasks with a kept solution."""
    _kept: dict[Hashable, list[frozenset[bytes]]] = field(default_factory=dict)
    _seen: set[bytes] = field(default_factory=set)
    _questions: Texts = field(default_factory=Texts)
    """The prompts of kept tasks."""

    @property
    def solutions(self) -> int:
        """All solutions so far."""
        return sum(each.solutions for each in self.credits.values())

    @property
    def kept(self) -> int:
        """Kept solutions so far."""
        return sum(each.kept for each in self.credits.values())

    def of(self, solutions: Iterable[Solution]) -> Iterator[Solution]:
        """The solutions to keep. Raises `UserError` at the end if there are none."""
        for solution in solutions:
            credit = self.credits.setdefault(solution.contributor, Credit())
            kind = self.kinds.setdefault(solution.kind, Credit())
            reason = self._why_not(solution)
            for each in (credit, kind):
                each.solutions += 1
                each.kept += not reason
                each.kept_tokens += 0 if reason else solution.tokens
            if reason:
                self.left_out[reason] += 1
            else:
                yield solution
        if not self.kept:
            raise UserError(
                f"none of {self.solutions:,} solutions passes {self.rules.described()}: "
                f"{self.reasons() or 'there are none'}; widen the rules, or take more solutions or "
                "a stronger teacher"
            )

    def reasons(self) -> str:
        """How many were left out, by reason."""
        return ", ".join(f"{count:,} {reason}" for reason, count in self.left_out.most_common())

    def _why_not(self, solution: Solution) -> str:
        """Why a solution is left out; empty: it is kept, and remembered."""
        rules = self.rules
        if not rules.reward[0] <= solution.reward <= rules.reward[1]:
            return "outside --reward"
        if not solution.finished and not rules.unfinished:
            return "unfinished"
        if not rules.tokens[0] <= solution.tokens <= rules.tokens[1]:
            return "outside --tokens"
        own = " ".join(solution.prompt.split()), " ".join(solution.text.split())
        digest = blake3("\0".join(own).encode()).digest(16)
        if digest in self._seen:
            return "duplicates"
        kept = self._kept.get(solution.task, [])
        if len(kept) >= rules.per_task:
            return "beyond --per-task"
        runs = shingles(solution.text)
        if any(similarity(runs, other) > rules.similarity for other in kept):
            return "beyond --similarity"
        if not kept and rules.question_similarity < 1:
            asked = shingles(solution.prompt)
            if self._questions.nearest(asked)[0] > rules.question_similarity:
                return "beyond --question-similarity"
            self._questions.add(asked, "")
        self._seen.add(digest)
        self.tasks += not kept
        self._kept.setdefault(solution.task, []).append(runs)
        return ""


def _shown(bounds: Range) -> str:
    return ":".join("" if math.isinf(each) else f"{each:g}" for each in bounds)


CREDITS_FILE = "credits.json"

_Columns = dict[str, tuple[pa.DataType, str]]
_RECORD: _Columns = {
    name: (pa.float64() if name == "score" else pa.string(), meaning)
    for name, meaning in MEANINGS.items()
}
_MESSAGES: _Columns = {
    "messages": (
        pa.list_(pa.struct([pa.field("role", pa.string()), pa.field("content", pa.string())])),
        "the whole chat, with the model's turns as assistant; null after a prompt of text, and "
        "in a run where the chat template does not give the tokens of `turns` again",
    )
}
LOCAL: _Columns = {
    **_RECORD,
    **_MESSAGES,
    "environment": (pa.string(), "environment of the task"),
    "environment_version": (pa.string(), "its version"),
    "tokens": (pa.int64(), "tokens that the teacher wrote"),
}
"""Columns of solutions made on one machine."""
OF_RUN: _Columns = {**_RECORD, **COLUMNS, **_MESSAGES}
"""Columns of a run's solutions: also those of its rollouts."""

THIS_MACHINE = "this machine"
_MARKUP = re.compile(r"[\\`*_\[\]<>|#]")
"""What a name, which others chose, would format the card with."""


def write(solutions: Iterable[Solution], selection: Selection, out: Path, source: str) -> None:
    """Write the selected solutions, all or none; raises `UserError`. `source`: their maker."""
    table = Table(OF_RUN if source == "run" else LOCAL, ("synthetic", "reasoning"), "")
    aside = out.with_name(out.name + ".partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        write_parquet((each.row for each in selection.of(solutions)), aside, table.schema)
        write_card(aside, "Synthetic data", Table(table.columns, table.tags, _text(selection)))
        credits = {name or THIS_MACHINE: vars(each) for name, each in selection.credits.items()}
        (aside / CREDITS_FILE).write_text(to_json(credits, indent=2) + "\n", encoding="utf-8")
        aside.rename(out)
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror or error})") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def summary(selection: Selection) -> str:
    """What was kept, in a sentence."""
    left_out = selection.reasons()
    return (
        f"{selection.kept:,} of {selection.solutions:,} solutions are kept, of "
        f"{selection.tasks:,} tasks" + (f"; left out: {left_out}" if left_out else "")
    )


def credit_lines(credits: Mapping[str, Credit]) -> list[str]:
    """One line for each contributor, or kind of task, with the most tokens first."""
    order = sorted(credits.items(), key=lambda each: (-each[1].kept_tokens, each[0]))
    return [
        f"{printable(name) or THIS_MACHINE}: {credit.kept:,} of {credit.solutions:,} solutions, "
        f"{credit.kept_tokens:,} tokens"
        for name, credit in order
    ]


def _text(selection: Selection) -> str:
    lists = (("kind of task", selection.kinds), ("contributor", selection.credits))
    kept = "\n\n".join(
        "\n".join((f"Kept, by {what}:\n", *(f"- {line}" for line in credit_lines(credits))))
        for what, credits in lists
    )
    kept = _MARKUP.sub(r"\\\g<0>", kept)
    return (
        f"{summary(selection)}. Rules: `{selection.rules.described()}`. The first columns are "
        f"those of SYNTHETIC-1. Texts come from models, perhaps on untrusted machines.\n\n{kept}"
    )
