"""What trusted peers tell each other of leases and of slots that were taken."""

from __future__ import annotations

import trio

from swarm.run.admission import ADMISSION_LEASE_SECONDS
from swarm.run.members import PRESENCE_SECONDS, PRESENCE_SECONDS_MIN, ROUND_SECONDS, Member, Members
from swarm.run.run import Run
from swarm.wire.messages import LOST_MAX, Heartbeat, Slot
from tests.network.harness import identity, manifest, sealed_manifest
from tests.worlds import VirtualWorld

OWNER, TRAINER, VALIDATOR, WORKER = (identity(number) for number in range(1, 5))
RUN = Run(sealed_manifest(OWNER, manifest([TRAINER], [VALIDATOR])))
ME = Heartbeat(roles=["validator"])


async def exchange(peers: list[tuple[str, Members]], seconds: float) -> None:
    """Presence digests for a while."""
    for _ in range(int(seconds / PRESENCE_SECONDS)):
        await trio.sleep(PRESENCE_SECONDS)
        for _, members in peers:
            list(members.forget(ME))
        digests = [(peer, members.next_digest(ME)) for peer, members in peers]
        for peer, digest in digests:
            for other, members in peers:
                if other != peer:
                    members.hear(peer, digest)


def member(granted: float) -> Member:
    slot = Slot(admitted_ms=1, entry=bytes(16))
    return Member(Heartbeat(roles=["inference"]), trio.current_time(), slot, 0.0, granted)


async def test_a_lost_slot_is_forgotten_once_its_lease_has_ended() -> None:
    """Else each trusted peer would learn it again from the other, for ever."""
    world = VirtualWorld()
    trainer = Members(RUN, world, TRAINER.peer_id)
    validator = Members(RUN, world, VALIDATOR.peer_id)
    peers = [(str(TRAINER.peer_id), trainer), (str(VALIDATOR.peer_id), validator)]
    trainer.own[WORKER.peer_id] = member(0.0)
    trainer.lose(WORKER.peer_id)
    await exchange(peers, 2 * PRESENCE_SECONDS)
    assert validator.has_lost(WORKER.peer_id)
    await exchange(peers, 3 * ADMISSION_LEASE_SECONDS)
    assert not trainer.has_lost(WORKER.peer_id)
    assert not validator.has_lost(WORKER.peer_id)
    trainer.own[WORKER.peer_id] = member(trio.current_time())  # it has returned
    await exchange(peers, 2 * PRESENCE_SECONDS)
    assert trainer.lease_of(WORKER.peer_id) is not None
    assert validator.lease_of(WORKER.peer_id) is not None


async def test_more_lost_slots_than_a_digest_holds_are_all_named() -> None:
    world = VirtualWorld()
    trainer = Members(RUN, world, TRAINER.peer_id)
    validator = Members(RUN, world, VALIDATOR.peer_id)
    lost = [identity(100 + number).peer_id for number in range(2 * LOST_MAX)]
    for peer in lost:
        trainer.own[peer] = member(0.0)
        trainer.lose(peer)
    peers = [(str(TRAINER.peer_id), trainer), (str(VALIDATOR.peer_id), validator)]
    await exchange(peers, 3 * PRESENCE_SECONDS)
    assert all(validator.has_lost(peer) for peer in lost)


async def test_digests_follow_each_other_faster_where_they_have_many_pages() -> None:
    trainer = Members(RUN, VirtualWorld(), TRAINER.peer_id)
    trainer.next_digest(ME)
    assert trainer.digest_seconds == PRESENCE_SECONDS
    for number in range(1000):
        trainer.own[identity(100 + number).peer_id] = member(0.0)
    named = len(trainer.next_digest(ME).peers)
    assert trainer.digest_seconds * 1001 / named <= ROUND_SECONDS < PRESENCE_SECONDS * 1001 / named
    for number in range(9000):
        trainer.own[identity(2000 + number).peer_id] = member(0.0)
    trainer.next_digest(ME)
    assert trainer.digest_seconds == PRESENCE_SECONDS_MIN
