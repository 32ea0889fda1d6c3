"""Evidence of a fork: two heads of one log that its owner signed and that contradict each other."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from swarm.wire.envelope import ENVELOPE_BYTES_MAX, Dropped, Envelope, open_envelope
from swarm.wire.messages import LogHead

_Raw = Annotated[bytes, Meta(max_length=ENVELOPE_BYTES_MAX)]


class ForkEvidence(msgspec.Struct, array_like=True, frozen=True):
    """Two signed `LogHead` envelopes of one log, in the order in which they were received.

    If the second has as many entries or fewer, the signatures alone prove the fork. If it has more,
    whoever holds the entries of either head can prove it (`swarm.ledger.audit`).
    """

    first: _Raw
    second: _Raw

    def opened(self) -> tuple[Envelope, Envelope]:
        """Both heads, with checked signatures; raises `ValueError` if they are no evidence."""
        try:
            first, second = open_envelope(self.first), open_envelope(self.second)
        except Dropped as dropped:
            raise ValueError(f"evidence of a fork holds an invalid head ({dropped})") from dropped
        if not (isinstance(first.message, LogHead) and isinstance(second.message, LogHead)):
            raise ValueError("evidence of a fork holds something else than heads")
        if (first.sender, first.body.run) != (second.sender, second.body.run):
            raise ValueError("evidence of a fork holds heads of different logs")
        return first, second


def contradiction(first: Envelope, second: Envelope) -> str | None:
    """How two heads of one log contradict each other by their signatures alone, or None."""
    older, newer = sorted((first, second), key=lambda head: head.body.sequence)
    before, after = older.expect(LogHead), newer.expect(LogHead)
    if after.size < before.size:
        return f"it signed a head of {after.size} entries after one of {before.size}"
    if after.size == before.size and after.root != before.root:
        return f"it signed two different heads of {before.size} entries"
    return None


def explained(first: Envelope, second: Envelope) -> str:
    """One sentence about two heads of one log that a trusted peer keeps as contradictory."""
    sizes = sorted(head.expect(LogHead).size for head in (first, second))
    return contradiction(first, second) or (
        f"its head of {sizes[1]} entries does not follow from its head of {sizes[0]}"
    )
