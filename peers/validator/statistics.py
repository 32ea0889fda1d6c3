"""Figures across submissions: the draw of those to recompute, copies, speed.

None of them proves a fault.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import blake3

from swarm.node.run_node import RunNode
from swarm.rollouts.seeds import digest

DUPLICATE_GROUPS_MAX = 1 << 17
"""Groups remembered to recognise copies: about 30 MB, far more groups than `max_staleness`
admits."""


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


class Duplicates:
    """Recognises groups that any worker submitted before."""

    def __init__(self, groups_max: int = DUPLICATE_GROUPS_MAX) -> None:
        self._groups_max = groups_max
        self._first: OrderedDict[bytes, bytes] = OrderedDict()
        """The first submission (a hash over its groups) of each group, by the group's digest."""

    def seen(self, group_digests: Sequence[bytes], worker: str) -> int:
        """Count the groups copied from other submissions, and remember all groups.

        Returns 0 unless more than half are copies. Prompts and noise follow from a submission's own
        seed, so two honest submissions share a group only if both drew the same task (in the demo,
        one in a million) and sampled the same short answers. That is not a copy, and a group copied
        under another seed fails the sampling check anyway. So copies are a reason to recompute.
        A submission that is judged again is not a copy of itself.
        """
        own = blake3.blake3(worker.encode() + b"".join(group_digests)).digest()
        copies = sum(self._first.setdefault(group, own) != own for group in group_digests)
        while len(self._first) > self._groups_max:
            self._first.popitem(last=False)
        return copies if copies * 2 > len(group_digests) else 0


@dataclass
class Pace:
    """A worker's claimed generation speed, for `peers.validator.checks.history.Speed`."""

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
