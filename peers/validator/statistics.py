"""Figures across submissions: the draw of those to recompute, copies, speed.

None of them proves a fault.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import blake3

from swarm.node.run_node import RunNode
from swarm.rollouts.seeds import digest

DUPLICATE_GROUPS_MAX = 1 << 17
"""Most groups remembered to recognise copies, about 30 MB: a limit for runs with huge steps."""

PACES_MAX = 4096
"""Workers whose pace is remembered. One that is forgotten, because as many others handed something
in since, begins anew, as one that comes back under a new identity."""

PolicyKey = tuple[int, int]
"""(lineage, step) of a policy."""


def draw_secret(peer: RunNode) -> bytes:
    """The secret that decides which submissions a validator draws for recomputation.

    It follows from the validator's key, so that a restart draws the same ones again.
    """
    return peer.node.identity.sign(b"swarm/1/draws\x00" + peer.run.id.encode())


def prefill_wanted(secret: bytes, submission: bytes, share: float) -> bool:
    """Whether a submission, by its digest, is drawn for recomputation.

    The worker does not know the validator's secret, so it cannot influence the draw.
    """
    drawn = int.from_bytes(digest("swarm/1/prefill", secret, submission)[:8], "big")
    return drawn < share * 2**64


def rows_sampled(secret: bytes, submission: bytes, rows: int, count: int) -> list[int]:
    """The rows of a submission, by its digest, to recompute before anything of it is graded.

    Like `prefill_wanted`, the draw is the validator's own.
    """
    chance = Random(digest("swarm/1/rows", secret, submission))
    return sorted(chance.sample(range(rows), min(rows, count)))


class Duplicates:
    """Recognises groups that any worker submitted before, while their policy may still be used.

    A copy of an older group is a fake like any other: it is drawn for recomputation with the share
    of its worker's record, and fails there, since its noise and its policy are another's.
    """

    def __init__(self, groups_max: int = DUPLICATE_GROUPS_MAX) -> None:
        self._groups_max = groups_max
        self._first: dict[PolicyKey, OrderedDict[bytes, bytes]] = {}
        """By policy: the first submission (a hash over its groups) of each group, by digest."""

    def seen(self, group_digests: Sequence[bytes], worker: str, policy: PolicyKey) -> int:
        """Count the groups copied from other submissions, and remember all groups.

        Returns 0 unless more than half are copies. Prompts and noise follow from a submission's own
        seed, so two honest submissions share a group only if both drew the same task (in the demo,
        one in a million) and sampled the same short answers. That is not a copy, and a group copied
        under another seed fails the sampling check anyway. So copies are a reason to recompute.
        A submission that is judged again is not a copy of itself.
        """
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
    """A worker's claimed generation speed, for `peers.validator.checks.history.speed`."""

    started: float = -math.inf
    tokens: int = 0

    def observe(self, tokens: int, now: float) -> float:
        """Add a submission received at `now` (seconds); returns tokens per second since the first.

        The first submission gives 0, and a burst counts as if it had taken 1 s.
        """
        if self.started == -math.inf:
            self.started = now
            return 0.0
        self.tokens += tokens
        return self.tokens / max(1.0, now - self.started)
