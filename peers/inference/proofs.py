"""Proving a worker's own work for ever, before the ledger's entries about it are deleted, one epoch
after they are sealed: proofs (`swarm.ledger.proof_file`) are fetched a few seconds after each
verdict, and once more before it leaves."""

from collections.abc import Iterable

import trio

from swarm.errors import PeerError
from swarm.ledger.client import open_ledger, own_head
from swarm.ledger.proof_file import KeptProofs, Proven
from swarm.ledger.receipts import receipts_from
from swarm.node.run_node import RunNode
from swarm.wire.envelope import Envelope
from swarm.wire.identity import PeerId

SOON_SECONDS = 5.0
"""Mean time after a verdict until its validator is asked for the place in its log; verdicts that
come meanwhile share these four small requests, next to nothing beside the work of judging."""

LAST_SECONDS = 5.0
"""Longest time that leaving waits for the places of the last verdicts."""

PROVE_SECONDS = 60.0
"""Deadline for the proofs of one validator."""


class ProofKeeper:
    """Keeps this worker's proofs."""

    def __init__(self, peer: RunNode, most_bytes: int) -> None:
        self._peer = peer
        self._node = peer.node
        self._most_bytes = most_bytes
        self._kept = KeptProofs(peer.node.database, peer.run.id, most_bytes)
        self._silent: set[str] = set()
        """Validators that gave no proofs the last time, which is said once."""
        self._judging: set[str] = set()
        """Validators whose verdicts have come since they answered the last time."""
        self._judged = trio.Event()
        """Set while there are such validators."""
        self._asking = trio.Lock()

    def hear(self, verdict: Envelope) -> None:
        """Note that a verdict on this worker's submission has come."""
        self._judging.add(verdict.sender)
        self._judged.set()

    async def run(self) -> None:
        """Ask for proofs at the start and after verdicts, until cancelled."""
        if not self._most_bytes:
            return
        await self._kept.open()
        self._judging.update(self._peer.run.manifest.validator_ids())  # while this peer was away
        self._judged.set()
        while True:
            await self._judged.wait()
            await trio.sleep(SOON_SECONDS * self._node.world.random.uniform(0.5, 1.5))
            async with self._asking:
                await self._ask(self._judging)

    async def finish(self) -> None:
        """Keep what is not kept yet, before the peer leaves."""
        if self._most_bytes:
            with trio.move_on_after(LAST_SECONDS):
                async with self._asking:
                    await self._ask(self._judging)

    async def _ask(self, named: Iterable[str]) -> None:
        """Ask validators for proofs, one after the other."""
        validators = self._peer.run.manifest.validator_ids()
        self._silent &= set(validators)
        asked = [name for name in validators if name in named]
        self._judging.clear()
        self._judged = trio.Event()
        for validator in asked:
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
                self._judging.add(validator)  # asked again after the next verdict

    async def _prove(self, validator: PeerId) -> None:
        """Keep the proofs of what a validator has logged since the last time."""
        await self._node.reach(validator)
        deleted = 0
        async with open_ledger(self._node.transport, validator) as client:
            head = await own_head(client)
            start: int | None = self._kept.next_index(validator)
            while start is not None:
                page, start = await receipts_from(client, head, start, self._peer.peer_id)
                signed = self._peer.run.manifest_envelope
                deleted += await self._kept.keep([Proven(signed, receipt) for receipt in page])
        if deleted:
            self._node.events.emit("inference.proofs_deleted", proofs=deleted)
