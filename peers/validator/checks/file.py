"""The exact checks: all who have file, step order and manifest get the same results."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from peers.environments import NotGradable, Renderer, episodes_of
from peers.environments.collection import GroupTask
from peers.environments.episodes import EpisodeLimits, Replies
from peers.proofs.format import ProofFormatError, check_format, split
from peers.sandbox import SandboxError
from peers.validator.checks.base import Finding, at_most, check
from peers.validator.reader import Contents
from swarm.errors import UserError
from swarm.jobs.validation import UngradedGroup
from swarm.rollouts.rollouts import FINISHES, MODEL, Offsets, Rollouts
from swarm.rollouts.signed_turns import BadTurn, check_turns, open_turn
from swarm.rollouts.submission_file import BadSubmission
from swarm.world.progress import checkpoint

FAILURES_SECONDS_MAX = 30.0
"""Time for which an environment may fail over groups of one submission before it is asked about no
other: code that does not return, or a judge that does not answer, would take as long in each."""


@dataclass
class Inspection:
    """One submission under inspection, independent of this machine and of the time."""

    read: Callable[[], Contents]
    """Reads the hostile file; raises `BadSubmission`."""
    header: Mapping[str, Any]
    """Expected header fields, from the announcement, the step order and the manifest."""
    groups: Sequence[GroupTask | None]
    """None for a group of a served environment."""
    environments: Sequence[int]
    """[groups] Index of each group's environment."""
    prompts: Sequence[Sequence[int] | None]
    """[groups][tokens] Token ids of each group's prompt; None for that of an environment peer."""
    group_size: int
    renderer: Renderer
    vocabulary: int
    limits: EpisodeLimits
    swaps_max: int = 0
    """Most swaps of weights while the submission was generated."""
    run: str = ""
    seed: bytes = b""
    """The submission's, which signed turns name."""
    environment_peers: Sequence[str] = ()
    """Peers whose signed turns count."""
    hung: str = ""
    """Why environments must not be asked: their code did not return before."""
    grading_seconds: float = math.inf
    """Wall time for all that environments are asked. Then the remaining groups are given up."""
    ungraded: dict[int, UngradedGroup] = field(default_factory=dict)
    """Groups over which an environment failed, by index."""
    _failures: dict[int, tuple[str, float]] = field(default_factory=dict)
    """The newest failure of each environment, by index, and the seconds that all took."""
    _asked_seconds: float = 0.0
    """Wall time that environments have taken."""

    def give_up(self, group: int, reason: str, *, not_gradable: bool = False) -> None:
        """Note that a group cannot be replayed or graded."""
        self.ungraded.setdefault(
            group, UngradedGroup(group=group, reason=reason, not_gradable=not_gradable)
        )

    def is_given_up(self, group: int) -> bool:
        """Whether no environment is asked about a group any more."""
        is_here = self.groups[group] is not None
        if self.hung and is_here:
            self.give_up(group, self.hung)
        if self._asked_seconds >= self.grading_seconds and is_here:
            self.give_up(
                group,
                "grading this submission took more than limits.grading_seconds = "
                f"{self.grading_seconds:g}",
            )
        reason, seconds = self._failures.get(self.environments[group], ("", 0.0))
        if seconds > FAILURES_SECONDS_MAX:
            self.give_up(group, reason)
        return group in self.ungraded

    @contextmanager
    def asking(self, group: int) -> Iterator[None]:
        """Run an environment's code for a group, which is given up if that fails."""
        begun = time.monotonic()
        try:
            yield
        except SandboxError:
            raise  # the submission is judged again: the sandbox may only have been too slow
        except UserError as error:
            self.give_up(group, str(error), not_gradable=isinstance(error, NotGradable))
            _, before = self._failures.get(self.environments[group], ("", 0.0))
            spent = before + time.monotonic() - begun
            self._failures[self.environments[group]] = (str(error), spent)
        finally:
            self._asked_seconds += time.monotonic() - begun

    def tokens_before(self) -> Offsets:
        """[rows] Tokens of each row's limit that its prompt, a continued state's, has used up."""
        prefixes = [len(each.prefix) if each else 0 for each in self.groups]
        return np.repeat(np.array(prefixes, np.int64), self.group_size)

    @cached_property
    def contents(self) -> Contents:
        """Header and rollouts, read on first use; raises `BadSubmission`."""
        return self.read()

    @property
    def rollouts(self) -> Rollouts:
        return self.contents.rollouts


@check("schema", proven=True)
def schema(evidence: Inspection) -> Finding:
    """Sound Parquet with exactly a submission's columns, in bounds. Figure: the first fault's."""
    try:
        evidence.contents  # noqa: B018 - reads the file
    except BadSubmission as fault:
        return Finding(
            fault.figure,
            fault.threshold,
            passed=False,
            detail=fault.detail,
            check=fault.check,
            proven=fault.proven,
        )
    return at_most(0, 0)


@check("header", proven=True)
def header_fields(evidence: Inspection) -> Finding:
    """Header fields that differ from the signed announcement, the step order or the manifest."""
    header, expected = evidence.contents.header, evidence.header
    wrong = [name for name, value in expected.items() if getattr(header, name) != value]
    detail = ""
    if wrong:
        said = getattr(header, wrong[0])
        detail = f"the header gives {wrong[0]} as {said!r}, not {expected[wrong[0]]!r}"[:300]
    return at_most(len(wrong), 0, detail)


@check("counts", proven=True)
def counts(evidence: Inspection) -> Finding:
    """All groups are there, in order. Figure: the rows if not, else those out of order."""
    rollouts, group_size = evidence.rollouts, evidence.group_size
    rows = np.arange(len(evidence.groups) * group_size)
    if len(rollouts) != len(rows):
        detail = f"{len(rollouts)} rows instead of {len(rows)}"
        return Finding(len(rollouts), len(rows), passed=False, detail=detail)
    misplaced = (rollouts.group != rows // group_size) | (rollouts.sample != rows % group_size)
    return at_most(int(misplaced.sum()), 0, "rows are missing, repeated or out of order")


@check("prompts", proven=True)
def prompts(evidence: Inspection) -> Finding:
    """Rows with another environment or prompt than the seed determines."""
    rollouts, group_size = evidence.rollouts, evidence.group_size
    wrong = [
        row
        for row in range(len(rollouts))
        if evidence.prompts[row // group_size] not in (None, rollouts.prompt(row))
        or rollouts.environment[row] != evidence.environments[row // group_size]
    ]
    detail = ""
    if wrong:
        detail = f"row {wrong[0]} does not have the prompt that the seed determines"
    return at_most(len(wrong), 0, detail)


@check("tokens", proven=True)
def tokens(evidence: Inspection) -> Finding:
    """Tokens outside the vocabulary, and those beyond the model's context.

    All segments count: an environment that fails may leave its turns without a replay."""
    tokens = evidence.rollouts.tokens
    outside = int(((tokens < 0) | (tokens >= evidence.vocabulary)).sum())
    lengths = np.diff(evidence.rollouts.token_offsets)
    beyond = int((lengths - evidence.limits.positions_max).clip(min=0).sum())
    return at_most(
        outside + beyond,
        0,
        f"{outside} token ids lie outside the vocabulary, {beyond} tokens beyond the context",
    )


@check("spans", proven=True)
def spans(evidence: Inspection) -> Finding:
    """Every token is of the step order's policy or, where the run allows swaps, of later ones: in
    order in each row, at most `swaps_max` + 1. Figure: spans of another policy, else policies."""
    named, swaps_max = evidence.contents.header.policy, evidence.swaps_max
    policies, offsets = evidence.rollouts.span_policies, evidence.rollouts.span_offsets
    if not swaps_max:
        others = int((policies != named).sum())
        return at_most(others, 0, f"{others} spans come from another policy than {named}")
    earlier = policies < named
    falls = policies[1:] < policies[:-1]
    falls[offsets[1:-1] - 1] = False  # from one row to the next
    wrong = int(earlier.sum() + falls.sum())
    if wrong:
        return at_most(
            wrong,
            0,
            f"{wrong} spans come from a policy before {named}, which the step order names, or "
            "before that of the span they follow",
        )
    count = len(np.unique(policies))
    return at_most(
        count,
        swaps_max + 1,
        f"{count} policies sampled the submission; the run allows {swaps_max} swaps",
    )


@check("ending", proven=True)
def ending(evidence: Inspection) -> Finding:
    """Rollouts with a segment that does not end at its first stop token or at the token limit, or
    contradicts its finish reason."""
    rollouts, limits = evidence.rollouts, evidence.limits
    stops = np.isin(rollouts.tokens, list(limits.stop_ids))
    ends = np.cumsum(rollouts.segment_lengths, dtype=np.int64)
    stops_in_segment = np.add.reduceat(stops.astype(np.int64), ends - rollouts.segment_lengths)
    stopped = stops[ends - 1]
    model = rollouts.segment_kinds == MODEL
    after = model & (stops_in_segment != stopped)  # a stop token that is not the last
    said = rollouts.segment_finishes == FINISHES.index("stop")
    longest = limits.max_new_tokens - evidence.tokens_before()
    full = np.repeat(rollouts.model_lengths() == longest, rollouts.segment_counts())
    elsewhere = model & ((said != stopped) | (~stopped & ~full))
    starts = rollouts.segment_offsets[:-1]
    rows_after = np.logical_or.reduceat(after, starts)
    too_long = rollouts.model_lengths() > longest
    wrong = rows_after | np.logical_or.reduceat(elsewhere, starts) | too_long
    detail = ""
    if wrong.any():
        row = int(wrong.argmax())
        what = "continues after a stop token"
        if not rows_after[row]:
            what = "ends before a stop token and the token limit, after the limit, "
            what += "or with a wrong finish reason"
        detail = f"a model segment of row {row} {what}"
    return at_most(int(wrong.sum()), 0, detail)


@check("proof_format", proven=True)
def proof_format(evidence: Inspection) -> Finding:
    """Rows with a malformed proof; checking what it says needs the policy."""
    rollouts = evidence.rollouts
    faults = []
    for row in range(len(rollouts)):
        try:
            check_format(split(rollouts.proof(row)), rollouts.span_lengths_of(row))
        except ProofFormatError as error:
            faults.append(f"row {row}: {error}")
    return at_most(len(faults), 0, faults[0] if faults else "")


@check("signed_turns", proven=True)
def signed_turns(evidence: Inspection) -> Finding:
    """Groups of served environments in which an environment peer has not signed the prompt and
    every turn for their place in this submission and after the tokens before them."""
    turns = evidence.contents.turns or [[] for _ in range(len(evidence.rollouts))]
    faults = []
    for group, drawn in enumerate(evidence.groups):
        rows = range(group * evidence.group_size, (group + 1) * evidence.group_size)
        if drawn is not None:
            if any(turns[row] for row in rows):
                faults.append(f"row {rows[0]} has signed turns of an environment that is local")
            continue
        try:
            _check_group(evidence, group, [turns[row] for row in rows])
        except BadTurn as error:
            faults.append(f"group {group}: {error}")
    return at_most(len(faults), 0, faults[0] if faults else "")


def _check_group(evidence: Inspection, group: int, turns: Sequence[Sequence[bytes]]) -> None:
    if not turns[0]:
        raise BadTurn("its first row has no signed prompt")
    run, peers = evidence.run, evidence.environment_peers
    prompt = open_turn(
        turns[0][0],
        run=run,
        peers=peers,
        seed=evidence.seed,
        group=group,
        sample=0,
        index=0,
        before=(),
    )
    for sample, own in enumerate(turns):
        checkpoint()
        failed = check_turns(
            prompt,
            own[1:] if sample == 0 else own,
            evidence.rollouts.rollout(group * evidence.group_size + sample).segments,
            run=run,
            peers=peers,
            sample=sample,
            max_new_tokens=evidence.limits.max_new_tokens,
        )
        if failed:
            evidence.give_up(group, failed)


@check("turns", proven=True)
def turns(evidence: Inspection) -> Finding:
    """Rows in which an environment's turn or end differs; none of a group over which it fails. It
    runs the environment's code, which may not return; see `Inspection.hung`."""
    counts = evidence.rollouts.segment_counts().tolist()
    wrong = [row for row, count in enumerate(counts) if not _replays(evidence, row, count)]
    detail = ""
    if wrong:
        detail = f"row {wrong[0]} differs from the environment's answer"
    return at_most(len(wrong), 0, detail)


def _replays(evidence: Inspection, row: int, length: int) -> bool:
    group = row // evidence.group_size
    drawn = evidence.groups[group]
    if drawn is None:
        return True  # its turns are signed
    if drawn.prefix or episodes_of(drawn.environment) is None:
        return length == 2
    if evidence.is_given_up(group):
        return True
    with evidence.asking(group):
        return _is_replayed(evidence, row, drawn)
    return True


def _is_replayed(evidence: Inspection, row: int, drawn: GroupTask) -> bool:
    segments = evidence.rollouts.rollout(row).segments
    replies = Replies(drawn.environment, drawn.task, evidence.renderer, evidence.limits)
    for count in range(2, len(segments) + 1, 2):
        checkpoint()
        answer = replies.next(segments[:count])
        given = None if count == len(segments) else list(segments[count].tokens)
        if answer != given:
            return False
    return True


CHECKS = (schema, header_fields, counts, prompts, tokens, spans, ending, proof_format, signed_turns)
"""The checks that run no code over what a worker wrote."""

REPLAYS = (turns,)
