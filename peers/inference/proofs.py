"""Proving a worker's own work for ever, before the ledger's entries about it are deleted.

Validators delete entries one epoch after they are sealed. Until then they prove them under the root
that the seal, and the next 1,024 seals, name. This worker fetches these proofs when it sees a newer
seal, and keeps them (`swarm.ledger.kept_proofs`). Until then it keeps its receipts under the heads
that it saw, so that it has them when the network is gone.
"""

from __future__ import annotations

import trio

from swarm.envelope import Envelope
from swarm.errors import PeerError
from swarm.identity import PeerId
from swarm.ledger.client import LedgerClient, open_ledger, own_head
from swarm.ledger.kept_proofs import KeptProofs
from swarm.ledger.proof_file import Proven
from swarm.ledger.receipts import receipts_from, sealed_proofs
from swarm.messages import LogHead
from swarm.node.run_node import RunNode

LOOK_SECONDS = 120.0
"""Mean interval at which each validator is asked for its newest seal: one small request."""

PROVE_SECONDS = 60.0
"""Deadline for the proofs of one validator. What is missing then is asked for the next time."""


class ProofKeeper:
    """Keeps this worker's proofs."""

    def __init__(self, peer: RunNode, most_bytes: int) -> None:
        self._peer = peer
        self._node = peer.node
        self._most_bytes = most_bytes
        self._kept = KeptProofs(peer.node.database, peer.run.id, most_bytes)
        self._proven: dict[str, int] = {}
        """By validator: the sealed entries of its log among which everything is proven."""
        self._silent: set[str] = set()
        """Validators that gave no proofs the last time, which is said once."""

    async def run(self) -> None:
        """Look for new seals until cancelled."""
        if not self._most_bytes:
            return
        await self._kept.open()
        while True:
            await trio.sleep(LOOK_SECONDS * self._node.world.random.uniform(0.5, 1.5))
            validators = self._peer.run.manifest.validator_ids()
            self._proven = {name: self._proven.get(name, 0) for name in validators}
            self._silent &= set(validators)
            for validator in validators:
                try:
                    with trio.fail_after(PROVE_SECONDS):
                        await self._prove(PeerId(validator))
                    self._silent.discard(validator)
                except (PeerError, trio.TooSlowError) as error:
                    reason = str(error) or f"no answer within {PROVE_SECONDS:g} s"
                    if validator not in self._silent:
                        self._node.events.emit(
                            "inference.proofs_not_kept", remote=validator, reason=reason
                        )
                    self._silent.add(validator)

    async def _prove(self, validator: PeerId) -> None:
        """Keep the proofs of what a validator has logged and sealed since the last time."""
        await self._node.reach(validator)
        count = dropped = 0
        async with open_ledger(self._node.transport, validator) as client:
            sealed = await client.sealed_size(validator)
            head = await own_head(client)
            await self._keep_unsealed(client, head, sealed)
            if sealed <= self._proven[validator]:
                return
            if head.expect(LogHead).size < sealed:
                raise PeerError(f"{validator} names a seal of more entries than its log has")
            start: int | None = self._kept.next_index(validator, sealed=True)
            while start is not None and start < sealed:
                page, start = await receipts_from(client, head, start, self._peer.peer_id)
                receipts = [each for each in page if each.index < sealed]
                proofs = await sealed_proofs(client, head, receipts, sealed)
                signed = self._peer.run.manifest_envelope
                dropped += await self._kept.keep(
                    [
                        Proven(signed, receipt, sealed, proof)
                        for receipt, proof in zip(receipts, proofs, strict=True)
                    ]
                )
                count += len(receipts)
        self._proven[validator] = sealed
        if count:
            self._node.events.emit(
                "inference.proofs_kept", remote=validator, proofs=count, dropped=dropped
            )

    async def _keep_unsealed(self, client: LedgerClient, head: Envelope, sealed: int) -> None:
        """Keep the receipts that no seal covers yet; their proofs under a seal replace them."""
        start: int | None = max(sealed, self._kept.next_index(client.peer, sealed=False))
        while start is not None:
            page, start = await receipts_from(client, head, start, self._peer.peer_id)
            signed = self._peer.run.manifest_envelope
            await self._kept.keep([Proven(signed, receipt) for receipt in page])
