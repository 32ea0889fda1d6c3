"""What a submission shows beside earlier ones: copied groups, implausible speed, rising evidence.

None proves a fault. Two honest groups of an easy task may be the same, and a copy under another
seed fails the recomputation. So each is only a reason to recompute this submission."""

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import blake3

from peers.validator.checks.base import Finding, at_most, check
from swarm.ledger.evidence import WORDS, Standing
from swarm.wire.manifest import Thresholds

DUPLICATE_GROUPS_MAX = 1 << 17
"""Most groups remembered to recognise copies, about 30 MB: a limit for runs with huge steps."""

PACES_MAX = 4096
"""Workers whose pace is remembered. One that is forgotten, because as many others handed something
in since, begins anew, as one that comes back under a new identity."""

PolicyKey = tuple[int, int]
"""(lineage, step) of a policy."""


class Duplicates:
    """Recognises groups that any worker submitted before, while their policy may still be used.

    A copy of an older group is a fake like any other: it is drawn for recomputation with the share
    of its worker's record, and fails there, since its noise and its policy are another's."""

    def __init__(self, groups_max: int = DUPLICATE_GROUPS_MAX) -> None:
        self._groups_max = groups_max
        self._first: dict[PolicyKey, OrderedDict[bytes, bytes]] = {}
        """By policy: the first submission (a hash over its groups) of each group, by digest."""

    def seen(self, group_digests: Sequence[bytes], worker: str, policy: PolicyKey) -> int:
        """The number of copied groups, 0 unless more than half are; remembers all groups.

        Two honest submissions share a group only if both drew the same task (in the demo, one in a
        million) and sampled the same short answers. One judged again is no copy of itself."""
        own = blake3.blake3(worker.encode() + b"".join(group_digests)).digest()
        held = self._first.setdefault(policy, OrderedDict())
        oldest_first = [self._first[each] for each in sorted(self._first)]
        copies = 0
        for group in group_digests:
            held.setdefault(group, own)
            copies += next(each[group] for each in oldest_first if group in each) != own
        excess = sum(map(len, self._first.values())) - self._groups_max
        for each in sorted(self._first):
            while self._first[each] and excess > 0:
                self._first[each].popitem(last=False)
                excess -= 1
        return copies if copies * 2 > len(group_digests) else 0

    def forget_before(self, oldest: PolicyKey) -> None:
        """Forget the groups of older policies."""
        self._first = {policy: held for policy, held in self._first.items() if policy >= oldest}


@dataclass
class Pace:
    """A worker's claimed generation speed."""

    started: float = -math.inf
    tokens: int = 0

    def observe(self, tokens: int, now: float) -> float:
        """Tokens per second since the first submission, which gives 0; a burst counts as 1 s."""
        if self.started == -math.inf:
            self.started = now
            return 0.0
        self.tokens += tokens
        return self.tokens / max(1.0, now - self.started)


@dataclass
class History:
    """A submission and the records of earlier ones, to which a figure's first use adds it."""

    worker: str
    policy: PolicyKey
    group_digests: Sequence[bytes]
    tokens: int
    duplicates: Duplicates
    pace: Pace
    now: float

    @cached_property
    def groups_copied(self) -> int:
        """Groups that submissions of this or a slightly older policy have, if more than half."""
        return self.duplicates.seen(self.group_digests, self.worker, self.policy)

    @cached_property
    def tokens_per_second(self) -> float:
        """The worker's completion tokens per second since its first submission."""
        return self.pace.observe(self.tokens, self.now)

    @property
    def is_striking(self) -> bool:
        """Whether the submission has to be recomputed, whatever its worker's record is."""
        copied = self.groups_copied  # both figures belong into the records
        return self.tokens_per_second > WORKER_TOKENS_PER_SECOND_MAX or copied > 0


WORKER_TOKENS_PER_SECOND_MAX = 1e6
"""No single peer generates faster. Who submits more pools machines or fabricates."""


@check("speed", quarantines=True)
def speed(evidence: History) -> Finding:
    """Completion tokens per second are no more than a single machine's.

    Other machines may have helped, so a failure only withholds the submission, without credit. It
    is recomputed first: no unchecked text is quarantined."""
    return at_most(
        evidence.tokens_per_second,
        WORKER_TOKENS_PER_SECOND_MAX,
        "more tokens a second than any one machine generates",
    )


@dataclass(frozen=True)
class Record:
    """The evidence against a worker so far, and the run's thresholds."""

    standing: Standing
    thresholds: Thresholds

    @property
    def odds(self) -> float:
        """log10 of the odds against an honest worker, over all of its submissions."""
        return max(0.0, self.standing.log_capital / math.log(10))

    @property
    def odds_max(self) -> float:
        return -math.log10(self.thresholds.refusal_p_value)

    @property
    def is_near(self) -> bool:
        """Whether the worker's next submission has to be recomputed, however good its record."""
        return self.odds > self.odds_max


@check("evidence", quarantines=True)
def rising(evidence: Record) -> Finding:
    """Honest chance explains the worker's earlier evidence. Figure: log10 of the odds against it.

    Far below the odds that evict, so that an honest worker whose engine rounds unusually learns of
    it in time, and nobody trains on a cheat's work. It is credited: by itself it may be good."""
    evicts = -math.log10(evidence.thresholds.eviction_p_value)
    return at_most(
        evidence.odds,
        evidence.odds_max,
        f"the evidence against this worker has risen to odds of 10^{evidence.odds:.1f} to 1, "
        f"and 10^{evicts:.0f} to 1 evicts it; most shows "
        f"{WORDS[evidence.standing.process]}. Compare its engine and precision with what the "
        "run tolerates (swarm doctor)",
    )
