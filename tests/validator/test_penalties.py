"""Waste costs its worker a growing pause, and refusals are rationed."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import trio
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from peers.validator.inbox import Client, Inbox
from peers.validator.penalties import (
    PAUSE_SECONDS_MAX,
    PAUSE_SECONDS_MIN,
    REFUSALS_BURST,
    WASTES_FREE,
    WASTES_KEPT_SECONDS,
    WORKERS_REMEMBERED_MAX,
    Penalties,
)
from peers.validator.role import ValidatorRole
from simnet.simulation import Peer
from swarm.run.run import Run
from swarm.transport import BlobReference, Refused
from swarm.wire.envelope import Envelope
from swarm.wire.identity import PeerId
from swarm.wire.messages import Acknowledgement, Verdict
from swarm.world.disk import LocalDisk
from tests.network.harness import identity, in_virtual_time, manifest, sealed, sealed_manifest
from tests.orders import verdict
from tests.trainer.runs import RUN
from tests.validator.test_numbers import kinds, part_of, submitting
from tests.worlds import VirtualWorld

RUNNER = RUN
Outcome = Literal["accepted", "refused", "quarantined"]
DISK_BYTES = 64 << 20


def said(
    outcome: Outcome, failed: str = "", *, by: int = 1, number: int = 0, at: float = 0.0
) -> Envelope:
    """A logged verdict on the worker with identity 2, by the validator with identity `by`."""
    judged = verdict(
        number, worker=identity(2).peer_id, outcome=outcome, failed=failed, log_index=number
    )
    return sealed(identity(by), judged, "owner/run", at=at)


async def test_the_first_wastes_are_free_and_each_further_one_doubles_the_pause() -> None:
    penalties, pauses = Penalties(VirtualWorld(), identity(1).peer_id), []
    for _ in range(WASTES_FREE + 12):
        penalties.waste("worker")
        pauses.append(penalties.pause_seconds("worker"))
    assert pauses[:WASTES_FREE] == [0] * WASTES_FREE
    assert pauses[WASTES_FREE : WASTES_FREE + 3] == pytest.approx(
        [PAUSE_SECONDS_MIN, 2 * PAUSE_SECONDS_MIN, 4 * PAUSE_SECONDS_MIN]
    )
    assert max(pauses) == pytest.approx(PAUSE_SECONDS_MAX)
    assert penalties.pause_seconds("another") == 0
    await trio.sleep(WASTES_KEPT_SECONDS + 1)
    penalties.waste("worker")
    assert penalties.pause_seconds("worker") == 0, "it begins anew"


@given(st.lists(st.integers(0, 10), max_size=60))
def test_a_worker_wastes_little_in_any_hour(gaps: list[int]) -> None:
    """Counting what it may do while it is not paused."""

    async def main() -> None:
        penalties, wasted = Penalties(VirtualWorld(), identity(1).peer_id), 0
        for gap in gaps:
            await trio.sleep(gap)
            if penalties.pause_seconds("worker") == 0:
                penalties.waste("worker")
                wasted += 1
        assert wasted <= WASTES_FREE + 1 + sum(gaps) / PAUSE_SECONDS_MIN

    in_virtual_time(main)


@pytest.mark.parametrize(
    ("outcome", "failed", "counts"),
    [("refused", "proofs", 2), ("refused", "stale", 1), ("accepted", "", 15 / 16)],
)
async def test_a_refused_file_is_a_waste_and_an_accepted_one_makes_up_for_it(
    outcome: Outcome, failed: str, counts: int
) -> None:
    penalties, worker = Penalties(VirtualWorld(), identity(1).peer_id), identity(2).peer_id
    penalties.waste(worker)
    penalties.hear(said(outcome, failed))
    assert penalties._wastes[worker].count == counts


async def test_what_is_remembered_is_bounded() -> None:
    penalties = Penalties(VirtualWorld(), identity(1).peer_id)
    for number in range(WORKERS_REMEMBERED_MAX + 10):
        penalties.waste(str(number))
    assert len(penalties._wastes) == WORKERS_REMEMBERED_MAX


async def test_announcing_without_files_costs_a_growing_pause() -> None:
    async with submitting() as (_, peers, worker, _):
        validator = peers["validator"]
        for _ in range(WASTES_FREE + 1):
            assert await worker.announce(validator, 0) == []
        with pytest.raises(Refused, match="deliver more in 4 s") as caught:
            await worker.push(validator, worker.make(0))
        assert caught.value.status == 429
        await trio.sleep(PAUSE_SECONDS_MIN + 0.1)
        assert kinds(await worker.deliver(validator, 0)) == [Acknowledgement]


async def test_a_restart_forgets_no_refused_file() -> None:
    async with submitting() as (_, peers, worker, _):
        validator = peers["validator"]
        await (
            part_of(validator)
            .trusted_part("validator")
            .append_verdict(
                lambda index: verdict(
                    worker=worker.id, outcome="refused", failed="proofs", log_index=index
                )
            )
        )
        await validator.kill()
        await validator.start(resume=True)
        await trio.sleep(5)
        assert wastes(validator, worker.id) == 1


def wastes(validator: Peer, worker: str) -> int:
    role = validator.roles[0]
    assert isinstance(role, ValidatorRole)
    return round(role._penalties._wastes[worker].count)


async def test_refusals_beyond_a_quota_are_silent() -> None:
    async with submitting() as (_, peers, worker, said):
        answers = [await worker.announce(peers["validator"], 10**6 + n) for n in range(100)]
        refusals = [each for answer in answers for each in answer]
        assert kinds(refusals) == [Verdict] * len(refusals)
        assert REFUSALS_BURST <= len(refusals) <= REFUSALS_BURST + 2
        assert kinds(await worker.deliver(peers["validator"], 0)) == [Acknowledgement]
    assert not said.named("validator.verdict")[1:]


class SmallDisk(LocalDisk):
    """A disk of 64 MiB, on which only pushes take room."""

    held = 0

    def free_bytes(self) -> int:
        return DISK_BYTES - self.held


def test_bytes_are_bounded_per_worker_network_and_run_with_room_for_the_proven(
    tmp_path: Path,
) -> None:
    clients = {
        identity(number).peer_id: Client(network=f"10.0.{number % 2}.0/24")
        for number in range(2, 60)
    }
    other, proven = identity(60).peer_id, identity(61).peer_id
    clients[other] = Client(network="10.0.9.0/24")
    clients[proven] = Client(network="10.0.0.0/24", proven=True)
    run = Run(sealed_manifest(identity(1), manifest([identity(1)], [identity(1)])))
    disk = SmallDisk(tmp_path)
    inbox = Inbox(run, disk, VirtualWorld(1), judged=lambda _: False, client_of=clients.__getitem__)

    def push(worker: PeerId, size_bytes: int) -> str:
        """Why a push is refused; empty if it is not."""
        digest = blake3(b"%d" % disk.held).digest()
        try:
            inbox.accept(worker, BlobReference(digest, size_bytes))
        except Refused as refused:
            return str(refused)
        disk.held += size_bytes
        return ""

    kib, mib = 1 << 10, 1 << 20
    assert [push(other, 2 * mib) for _ in range(2)] == ["", ""]
    assert "of yours fill 6% of this disk" in push(other, kib)
    for worker in clients:
        if worker not in (other, proven):
            refusals = [push(worker, 64 * kib) for _ in range(8)]
            if any(refusals):
                break
            assert disk.held <= DISK_BYTES / 4
    assert disk.held <= DISK_BYTES / 4
    assert any("unproven workers" in each or "your network" in each for each in refusals)
    assert push(proven, 2 * mib) == ""


async def test_acceptances_do_not_pay_for_as_many_wastes() -> None:
    """Else a worker could replace every other draw that it dislikes by a file that kills the
    reader."""
    penalties, worker = Penalties(VirtualWorld(), identity(1).peer_id), identity(2).peer_id
    now = trio.current_time()
    for number in range(0, 40, 2):
        penalties.hear(said("accepted", number=number, at=now))
        penalties.hear(said("refused", "schema", number=number + 1, at=now))
    assert penalties.pause_seconds(worker) > 60


async def test_a_file_that_ends_the_children_is_a_waste() -> None:
    """It is quarantined, because the validator may be at fault, but it settles its number.

    Another validator's crash is no waste: a broken validator would pause workers everywhere.
    """
    penalties, worker = Penalties(VirtualWorld(), identity(1).peer_id), identity(2).peer_id
    for failed, counts in (("crash", 1), ("internal", 1), ("environment", 1)):
        penalties.hear(said("quarantined", failed))
        assert penalties._wastes[worker].count == counts, failed
    penalties.hear(said("quarantined", "crash", by=3))
    assert penalties._wastes[worker].count == 1
