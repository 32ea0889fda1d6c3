"""Receipts: verdicts, each proven to be in its validator's log."""

from dataclasses import dataclass

from swarm.errors import PeerError
from swarm.ledger import merkle
from swarm.ledger.client import LedgerClient
from swarm.ledger.entries import Judged, decode, judged
from swarm.wire.envelope import Envelope
from swarm.wire.messages import LogHead, Verdict


@dataclass(frozen=True)
class Receipt:
    """A verdict, and the proof that it is in its validator's log."""

    envelope: Envelope
    entry: bytes
    """The leaf: an encoded `Judged`."""
    index: int
    head: Envelope
    """The signed `LogHead` that the proof leads to."""
    proof: list[bytes]

    @property
    def verdict(self) -> Verdict:
        return self.envelope.expect(Verdict)

    @property
    def log_size(self) -> int:
        """Number of entries in the log at `head`."""
        return self.head.expect(LogHead).size

    def problem(self) -> str | None:
        """Why this receipt is invalid, or None; checked without any other data."""
        head, verdict = self.head.message, self.envelope.message
        if not isinstance(head, LogHead) or not isinstance(verdict, Verdict):
            return "it is not a verdict with a log head"
        if self.head.sender != self.envelope.sender:
            return "verdict and head are signed by different peers"
        if self.head.body.run != self.envelope.body.run:
            return "verdict and head belong to different runs"
        try:
            entry = decode(self.entry)
        except ValueError as error:
            return str(error)
        if not isinstance(entry, Judged) or entry != judged(verdict):
            return "the log entry differs from the verdict"
        if verdict.log_index != self.index:
            return f"the verdict names log index {verdict.log_index}, not {self.index}"
        leaf = merkle.leaf_hash(self.entry)
        if not merkle.verify_inclusion(leaf, self.index, head.size, self.proof, head.root):
            return "the inclusion proof does not hold"
        return None


async def receipts_from(
    client: LedgerClient, head: Envelope, start: int, worker: str = ""
) -> tuple[list[Receipt], int | None]:
    """Fetch a page of receipts from log index `start` on, and verify their proofs to `head`.

    An empty `worker`: all workers. Also returns the index of the next page, None after the last.
    Raises `PeerError` for an invalid receipt or a silent validator."""
    peer, size = client.peer, head.expect(LogHead).size
    items = await client.verdicts(worker, start) if start < size else []
    if not items:
        return [], None
    indices = [item.index for item in items]
    if indices[0] < start or indices != sorted(set(indices)):
        raise PeerError(f"{peer} sent receipts out of order")
    covered = [item for item in items if item.index < size]  # the rest are newer than `head`
    proofs = await client.inclusions(peer, [item.index for item in covered], size)
    receipts = []
    for item, proof in zip(covered, proofs, strict=True):
        envelope = client.opened(item.envelope, "receipt")
        receipt = Receipt(envelope, item.entry, item.index, head, proof)
        problem = receipt.problem()
        if problem is None and worker and receipt.verdict.worker != worker:
            problem = "it belongs to another worker"
        if problem is not None:
            raise PeerError(f"{peer} sent a bad receipt for entry {item.index}: {problem}")
        receipts.append(receipt)
    return receipts, indices[-1] + 1
