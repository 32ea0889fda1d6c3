"""Gossip: everyone who follows a topic hears of everything, liars and newcomers included."""

from __future__ import annotations

from itertools import pairwise

import trio

from swarm import defaults
from swarm.gossip import RUN, WORK, _Push
from swarm.messages import Acknowledgement, Checkpoint, Eviction, Heartbeat, Message, Submission
from tests.network.harness import (
    Member,
    TestRun,
    identity,
    in_virtual_time,
    manifest,
    running,
    sealed,
    sealed_manifest,
)

OWNER, TRAINER, VALIDATOR = (identity(n) for n in range(1, 4))
MANIFEST = sealed_manifest(OWNER, manifest([TRAINER], [VALIDATOR]))


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint(
        lineage=0, step=step, manifest_digest=bytes([step]) * 32, manifest_bytes=1, total_bytes=1
    )


def hears(member: Member, message_type: type[Message]) -> list[Message]:
    heard: list[Message] = []
    member.gossip.listen(message_type, lambda envelope: heard.append(envelope.message))
    return heard


async def line_of(run: TestRun, count: int) -> list[Member]:
    """The trainer and others, each connected only to the next."""
    members = [await run.add(TRAINER)]
    members += [await run.add(identity(100 + n)) for n in range(count)]
    for left, right in pairwise(members):
        await left.reach(right.id)
    await trio.sleep(5)
    return members


def test_an_announcement_reaches_everybody_along_a_line() -> None:
    async def main() -> None:
        async with running(MANIFEST) as run:
            members = await line_of(run, 10)
            heard = [hears(member, Checkpoint) for member in members]
            for step in (1, 2, 3):
                await members[0].announce(checkpoint(step))
            await trio.sleep(2)
            assert heard == [[checkpoint(1), checkpoint(2), checkpoint(3)]] * len(members)

    in_virtual_time(main)


def test_a_newcomer_learns_the_newest_states_and_old_evictions() -> None:
    async def main() -> None:
        async with running(MANIFEST) as run:
            members = await line_of(run, 2)
            validator = await run.add(VALIDATOR)
            await validator.reach(members[0].id)
            await trio.sleep(3)
            evicted = identity(999).peer_id
            await validator.announce(
                Eviction(peer=evicted, reason="caught"), defaults.EVICTION_LIFETIME_SECONDS
            )
            for step in range(1, 30):
                await members[0].announce(checkpoint(step))
            await trio.sleep(300)
            newcomer = await run.add(identity(500))
            heard, evictions = hears(newcomer, Checkpoint), hears(newcomer, Eviction)
            await newcomer.reach(members[2].id)
            await trio.sleep(5)
            assert heard == [checkpoint(29)]
            assert [message.peer for message in evictions] == [evicted]  # type: ignore[attr-defined]

    in_virtual_time(main)


def test_topics_are_not_sent_to_those_who_do_not_follow_them() -> None:
    async def main() -> None:
        async with running(MANIFEST) as run:
            validator = await run.add(VALIDATOR, (RUN, WORK))
            worker = await run.add(identity(200), (RUN,))
            trainer = await run.add(TRAINER, (RUN, WORK))
            await validator.reach(worker.id)
            await validator.reach(trainer.id)
            await trio.sleep(3)
            message = Acknowledgement(submission=bytes(32), worker=worker.id)
            at_worker, at_trainer = hears(worker, Acknowledgement), hears(trainer, Acknowledgement)
            await validator.announce(message)
            await trio.sleep(3)
            assert at_trainer == [message]
            assert at_worker == []

    in_virtual_time(main)


def test_a_lost_connection_heals_and_what_was_missed_arrives() -> None:
    async def main() -> None:
        async with running(MANIFEST) as run:
            trainer, other = await line_of(run, 1)
            heard = hears(other, Checkpoint)
            run.network.cut(trainer.id, other.id)
            await trio.sleep(1)
            assert trainer.gossip.neighbours() == []
            await trainer.announce(checkpoint(7))
            run.network.heal(trainer.id, other.id)
            await other.reach(trainer.id)
            await trio.sleep(3)
            assert heard == [checkpoint(7)]

    in_virtual_time(main)


def test_who_speaks_late_is_heard_by_one_that_has_neighbours_enough() -> None:
    """A peer joins the DHT, for seconds, before it gossips; and the lesser id begins."""

    async def main() -> None:
        async with running(MANIFEST) as run:
            enough = defaults.GOSSIP_NEIGHBOURS_WANTED
            keys = sorted(
                (identity(100 + n) for n in range(enough + 2)), key=lambda key: key.peer_id
            )
            hub, *others, late = [await run.add(key, speaks=key != keys[-1]) for key in keys]
            for other in [*others, late]:
                await other.reach(hub.id)
            await trio.sleep(8)
            assert hub.gossip.neighbours() == [other.id for other in others]
            await run.speak(late)
            await trio.sleep(15)
            assert late.gossip.neighbours() == [hub.id]

    in_virtual_time(main)


def test_a_neighbour_that_sends_forgeries_is_banned() -> None:
    async def main() -> None:
        async with running(MANIFEST) as run:
            victim = await run.add(TRAINER)
            liar_key = identity(300)
            liar = await run.add(liar_key)
            await liar.reach(victim.id)
            await trio.sleep(3)
            neighbour = next(iter(liar.gossip._neighbours.values()))
            good = sealed(TRAINER, checkpoint(1), MANIFEST.body.run).raw
            for n in range(defaults.GOSSIP_INVALID_MAX):
                forged = bytearray(good)
                forged[n] ^= 1
                liar.gossip._post(neighbour, _Push(bytes(forged)))
            await trio.sleep(3)
            assert "gossip.neighbour_banned" in victim.names()
            assert liar.id not in victim.transport.connected()

    in_virtual_time(main)


def test_what_is_never_gossiped_is_not_remembered_and_counts_against_the_sender() -> None:
    async def main() -> None:
        async with running(MANIFEST) as run:
            victim = await run.add(TRAINER)
            liar = await run.add(identity(300))
            await liar.reach(victim.id)
            await trio.sleep(3)
            neighbour = next(iter(liar.gossip._neighbours.values()))
            for n in range(defaults.GOSSIP_INVALID_MAX):
                invented = sealed(identity(400 + n), Heartbeat(roles=["relay"]), MANIFEST.body.run)
                liar.gossip._post(neighbour, _Push(invented.raw))
            await trio.sleep(3)
            assert "gossip.neighbour_banned" in victim.names()
            assert victim.gate.state(identity(400).peer_id, "heartbeat") is None

    in_virtual_time(main)


def test_an_event_that_came_as_a_request_is_gossiped_by_whom_it_was_made_to() -> None:
    """Both go through one gate, which has seen it already when a validator spreads it."""

    async def main() -> None:
        async with running(MANIFEST) as run:
            validator, trainer = await run.add(VALIDATOR), await run.add(TRAINER)
            heard: list[bytes] = []
            trainer.gossip.listen(Submission, lambda envelope: heard.append(envelope.digest))
            await validator.reach(trainer.id)
            await trio.sleep(3)
            offer = Submission(
                lineage=0, step=0, policy=0, number=0, digest=bytes(32), size_bytes=1, groups=1
            )
            envelope = sealed(identity(300), offer, MANIFEST.body.run)
            validator.gate.admit(envelope.raw)
            for _ in range(2):
                validator.gossip.publish(envelope)
            await trio.sleep(3)
            assert heard == [envelope.digest]
            assert validator.gossip.kept() == trainer.gossip.kept()

    in_virtual_time(main)


def test_whoever_was_away_hears_of_more_than_a_sender_may_send_at_once() -> None:
    async def main() -> None:
        async with running(MANIFEST) as run:
            validator = await run.add(VALIDATOR)
            count = round(defaults.SENDER_RATE_BURST) + 200
            for number in range(count):
                message = Acknowledgement(
                    submission=number.to_bytes(32, "big"), worker=validator.id
                )
                await validator.announce(message)
            newcomer = await run.add(TRAINER)
            heard = hears(newcomer, Acknowledgement)
            await newcomer.reach(validator.id)
            await trio.sleep(2)
            assert 0 < len(heard) < count
            await trio.sleep(2 * count / defaults.SENDER_RATE_PER_SECOND)
            assert len(heard) == count
            assert newcomer.gate.dropped["over_rate"] > 0

    in_virtual_time(main)


def test_garbage_frames_end_the_conversation_and_nothing_else() -> None:
    async def main() -> None:
        async with running(MANIFEST) as run:
            victim = await run.add(TRAINER)
            hostile = await run.add(identity(301))
            await hostile.reach(victim.id)
            for garbage in (b"\xc1", b"\x93\xa5hello", b"\x92\xa4push\xc4\x01x", b"x" * 1000):
                await trio.sleep(5)
                (neighbour,) = hostile.gossip._neighbours.values()
                await neighbour.stream.send(garbage)
            await trio.sleep(5)
            assert victim.names().count("gossip.neighbour_lost") >= 3
            honest = await run.add(identity(302))
            heard = hears(honest, Checkpoint)
            await honest.reach(victim.id)
            await trio.sleep(3)
            await victim.announce(checkpoint(1))
            await trio.sleep(3)
            assert heard == [checkpoint(1)]

    in_virtual_time(main)
