"""Reading trainers' figures: entries of their logs, each proven to be in the log."""

from __future__ import annotations

from collections.abc import Iterator

from swarm.errors import PeerError
from swarm.ledger import merkle
from swarm.ledger.client import LedgerClient
from swarm.ledger.entries import CheckpointPublished, decode
from swarm.ledger.wire import RECEIPTS_MAX
from swarm.wire.messages import LogHead


async def published_from(
    client: LedgerClient, owner: str, head: LogHead, start: int
) -> tuple[list[CheckpointPublished], int]:
    """Fetch a page of `owner`'s log from index `start` on; also returns where the next one begins.

    Returns the policies with figures among the entries, and checks their proofs to `head`. Raises
    `PeerError` when the answer does not hold.
    """
    raws, origin = await client.entries_or_origin(owner, start, head.size - start)
    start = origin.start if origin is not None else start  # the entries before are pruned
    found: dict[int, tuple[bytes, CheckpointPublished]] = {}
    for index, raw in enumerate(raws, start):
        try:
            entry = decode(raw)
        except ValueError as error:
            raise PeerError(f"{client.peer} sent {error}") from error
        if isinstance(entry, CheckpointPublished) and entry.figures is not None:
            found[index] = raw, entry
    for part in _parts(list(found)):
        proofs = await client.inclusions(owner, part, head.size)
        for index, proof in zip(part, proofs, strict=True):
            leaf = merkle.leaf_hash(found[index][0])
            if not merkle.verify_inclusion(leaf, index, head.size, proof, head.root):
                raise PeerError(f"{client.peer} sent entry {index}, which is not in its log")
    return [entry for _, entry in found.values()], start + len(raws)


def _parts(indices: list[int]) -> Iterator[list[int]]:
    for first in range(0, len(indices), RECEIPTS_MAX):
        yield indices[first : first + RECEIPTS_MAX]
