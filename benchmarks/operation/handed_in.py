"""The submissions that a real swarm's workers handed in, and those without a verdict or receipt."""

from __future__ import annotations

import trio

from swarm.ledger.entries import Judged
from tests.end_to_end.harness import Peer, Swarm
from tests.end_to_end.ledgers import Accounts

SETTLE_SECONDS = 60.0
"""For the last verdicts and receipts, once the run is over."""

Place = tuple[str, int, int]
"""(worker, step, number) of a submission."""


def delivered(peers: Swarm) -> set[Place]:
    """Submissions that a validator acknowledged."""
    return _places(peers, "inference.submission_delivered")


def receipts(peers: Swarm) -> set[Place]:
    return _places(peers, "inference.receipt")


def _places(peers: Swarm, event: str) -> set[Place]:
    return {
        (worker.identity.peer_id, told["step"], told["number"])
        for worker in peers.of_role("inference")
        for told in worker.heard(event)
    }


async def settle(peers: Swarm) -> None:
    """Wait until every submission has its receipt, at most `SETTLE_SECONDS`."""
    workers: list[Peer] = peers.of_role("inference")
    with trio.move_on_after(SETTLE_SECONDS):
        while delivered(peers) - receipts(peers):
            async with trio.open_nursery() as nursery:
                for worker in workers:
                    nursery.start_soon(_hear, worker, nursery.cancel_scope)


async def _hear(worker: Peer, heard: trio.CancelScope) -> None:
    await worker.said.wait_change()
    heard.cancel()


def lost(peers: Swarm, accounts: Accounts) -> tuple[set[Place], set[Place]]:
    """The submissions handed in that have no verdict, and those with one but without a receipt.

    A receipt is a signed verdict; the one for work that comes after its step is in no log.
    """
    judged = {
        (record.entry.worker, record.entry.step, record.entry.number)
        for record in accounts.records
        if isinstance(record.entry, Judged)
    }
    handed_in, received = delivered(peers), receipts(peers)
    return handed_in - judged - received, (handed_in & judged) - received
