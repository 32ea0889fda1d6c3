"""Who gets a gossip slot: trusted peers, then admitted ones, then a few strangers."""

from __future__ import annotations

from functools import partial
from itertools import islice

import pytest
import trio

from swarm.gossip.gossip import ADMITTED_SECONDS
from swarm.gossip.slots import (
    FULL_SECONDS,
    LASTING_SECONDS,
    NEIGHBOURS_MAX,
    NEIGHBOURS_WANTED,
    OPENING_MAX,
    RETRY_SECONDS,
    STARTED_UNTIL,
    STRANGER_SECONDS,
    STRANGERS_MAX,
    STRANGERS_PER_RANGE_MAX,
    YIELD_SECONDS,
    Neighbour,
    Slots,
)
from swarm.gossip.topics import PROTOCOL, RUN, Hello, encode
from swarm.transport import StreamError
from swarm.wire.messages import Acknowledgement, Admission, Checkpoint
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
from tests.network.test_gossip import checkpoint, hears

OWNER, TRAINER, VALIDATOR = (identity(n) for n in range(1, 4))
MANIFEST = sealed_manifest(OWNER, manifest([TRAINER], [VALIDATOR]))
SOME_SECONDS = YIELD_SECONDS + 2
STRANGERS = STRANGERS_MAX
SLOTS = NEIGHBOURS_MAX


async def crowd(
    run: TestRun, victim: Member, count: int, *, ranges: int, first: int, admitted: bool
) -> list[Member]:
    """So many peers from so many ranges of addresses, all connected to one."""
    members = []
    for number in range(count):
        key = identity(first + number)
        if not admitted:
            run.strangers.add(key.peer_id)
        host = f"{40 + first // 1000}.{number % ranges}.0.{number // ranges}"  # of public networks
        member = await run.add(key, host=host)
        await member.reach(victim.id)
        members.append(member)
    await trio.sleep(SOME_SECONDS)
    return members


def ids(members: list[Member]) -> set[str]:
    return {str(member.id) for member in members}


async def test_strangers_share_few_slots_and_leave_the_rest_to_those_admitted() -> None:
    async with running(MANIFEST) as run:
        victim = await run.add(VALIDATOR)
        near = await crowd(run, victim, 10, ranges=1, first=1000, admitted=False)
        most = STRANGERS_PER_RANGE_MAX
        assert len(ids(near) & set(victim.gossip.neighbours())) == most
        far = await crowd(run, victim, 2 * SLOTS, ranges=SLOTS, first=2000, admitted=False)
        assert len(ids([*near, *far]) & set(victim.gossip.neighbours())) == STRANGERS
        honest = await crowd(run, victim, SLOTS, ranges=SLOTS, first=3000, admitted=True)
        assert ids(honest) == set(victim.gossip.neighbours())
        trainer = await run.add(TRAINER)
        heard = hears(trainer, Acknowledgement)
        await trainer.reach(victim.id)
        await trio.sleep(SOME_SECONDS)
        message = Acknowledgement(submission=bytes(32), worker=victim.id)
        await victim.announce(message)
        await trio.sleep(1)
        assert heard == [message]


async def test_of_admitted_peers_the_most_crowded_range_gives_way() -> None:
    async with running(MANIFEST) as run:
        victim = await run.add(VALIDATOR)
        many = await crowd(run, victim, 2 * SLOTS, ranges=2, first=1000, admitted=True)
        assert len(victim.gossip.neighbours()) == SLOTS
        few = await crowd(run, victim, 6, ranges=3, first=2000, admitted=True)
        held = set(victim.gossip.neighbours())
        assert ids(few) <= held
        assert len(held & ids(many)) == SLOTS - len(few)


async def test_a_stranger_hears_of_the_run_alone_and_only_for_a_while() -> None:
    async with running(MANIFEST) as run:
        trainer, validator = await run.add(TRAINER), await run.add(VALIDATOR)
        await trainer.reach(validator.id)
        await trio.sleep(SOME_SECONDS)
        await trainer.announce(checkpoint(1))
        message = Acknowledgement(submission=bytes(32), worker=validator.id)
        await validator.announce(message)
        (stranger,) = await crowd(run, validator, 1, ranges=1, first=1000, admitted=False)
        policies, work = hears(stranger, Checkpoint), hears(stranger, Acknowledgement)
        await trainer.announce(checkpoint(2))
        again = Acknowledgement(submission=bytes([1]) * 32, worker=validator.id)
        await validator.announce(again)
        await trio.sleep(2)
        assert checkpoint(2) in policies and work == []
        await trio.sleep(STRANGER_SECONDS)
        assert stranger.id not in validator.gossip.neighbours()


async def test_who_is_not_admitted_any_more_hears_no_more_work() -> None:
    async with running(MANIFEST) as run:
        validator = await run.add(VALIDATOR)
        (member,) = await crowd(run, validator, 1, ranges=1, first=1000, admitted=True)
        work = hears(member, Acknowledgement)
        first, second = (
            Acknowledgement(submission=bytes([n]) * 32, worker=validator.id) for n in range(2)
        )
        await validator.announce(first)
        run.strangers.add(member.id)
        await trio.sleep(ADMITTED_SECONDS)
        assert member.id in validator.gossip.neighbours()
        await validator.announce(second)
        await trio.sleep(2)
        assert work == [first]


def test_an_admission_that_is_shown_opens_what_was_closed() -> None:
    """Whichever of the two ids sorts first."""

    async def main(number: int) -> None:
        async with running(MANIFEST) as run:
            validator = await run.add(VALIDATOR)
            await crowd(run, validator, STRANGERS, ranges=STRANGERS, first=1000, admitted=False)
            (newcomer,) = await crowd(run, validator, 1, ranges=1, first=number, admitted=False)
            assert newcomer.id not in validator.gossip.neighbours()
            work = hears(newcomer, Acknowledgement)
            run.strangers.discard(newcomer.id)
            admission = Admission(peer=newcomer.id, roles=["inference"])
            newcomer.gossip.show(sealed(VALIDATOR, admission, MANIFEST.body.run))
            await trio.sleep(SOME_SECONDS)
            assert newcomer.id in validator.gossip.members()
            message = Acknowledgement(submission=bytes(32), worker=validator.id)
            await validator.announce(message)
            await trio.sleep(1)
            assert work == [message]

    before = next(n for n in range(5000, 6000) if identity(n).peer_id < VALIDATOR.peer_id)
    after = next(n for n in range(5000, 6000) if identity(n).peer_id > VALIDATOR.peer_id)
    for number in (before, after):
        in_virtual_time(partial(main, number))


async def test_an_admission_that_comes_while_a_peer_is_greeted_is_shown_to_it() -> None:
    """Its `hello` had none, and the peer that it greeted would take it for a stranger."""
    number = next(n for n in range(5000, 6000) if identity(n).peer_id < VALIDATOR.peer_id)
    async with running(MANIFEST) as run:
        validator, newcomer = await run.add(VALIDATOR), await run.add(identity(number))
        run.strangers.add(newcomer.id)
        work = hears(newcomer, Acknowledgement)
        await newcomer.reach(validator.id)
        while newcomer.id not in validator.gossip.neighbours():  # noqa: ASYNC110
            await trio.sleep(0.001)
        assert validator.id not in newcomer.gossip.neighbours(), "its answer is on its way"
        run.strangers.discard(newcomer.id)
        admission = Admission(peer=newcomer.id, roles=["inference"])
        newcomer.gossip.show(sealed(VALIDATOR, admission, MANIFEST.body.run))
        await trio.sleep(1)
        assert newcomer.id in validator.gossip.members()
        message = Acknowledgement(submission=bytes(32), worker=validator.id)
        await validator.announce(message)
        await trio.sleep(1)
        assert work == [message]


async def test_peers_leave_slots_free_for_newcomers() -> None:
    async with running(MANIFEST) as run:
        keys = [identity(1000 + number) for number in range(2 * STARTED_UNTIL)]
        newcomer_key, worker_key, *keys = sorted(keys, key=lambda key: key.peer_id)
        worker = await run.add(worker_key)  # its id is the least, so it starts
        for key in keys:
            await (await run.add(key)).reach(worker.id)
        await trio.sleep(60)
        assert len(worker.gossip.neighbours()) == STARTED_UNTIL
        newcomer = await run.add(newcomer_key)
        await newcomer.reach(worker.id)
        await trio.sleep(SOME_SECONDS)
        assert newcomer.id in worker.gossip.neighbours()


async def test_a_peer_starts_few_conversations_at_a_time() -> None:
    async with running(MANIFEST) as run:
        worker = await run.add(identity(1000))
        slots = Slots(worker.transport, worker.world, worker.run.trusts)
        drawn = (identity(2000 + number).peer_id for number in range(1000))
        greater = (peer for peer in drawn if peer > worker.id)  # with these it starts
        for peer in islice(greater, OPENING_MAX):
            assert slots.may_open(peer)
            slots.attempt(peer)
        another = next(greater)
        assert not slots.may_open(another)
        slots.opened(peer)
        assert slots.may_open(another)


async def test_whoever_gets_no_slot_hears_no_hello() -> None:
    """It would take the refusal for a conversation, and ask again at once."""
    async with running(MANIFEST) as run:
        victim = await run.add(VALIDATOR)
        await crowd(run, victim, STRANGERS, ranges=STRANGERS, first=1000, admitted=False)
        (newcomer,) = await crowd(run, victim, 1, ranges=1, first=2000, admitted=False)
        stream = await newcomer.transport.open_stream(victim.id, PROTOCOL)
        await stream.send(encode(Hello(run.manifest.body.run, 0, [RUN], [], b"")))
        with pytest.raises(StreamError):
            assert await stream.receive() is None
            raise StreamError("ended without a word")


async def test_whoever_has_neighbours_leaves_a_full_trusted_peer_alone_for_a_while() -> None:
    """If everybody asked the trusted peers again and again, each would refuse the whole run."""
    async with running(MANIFEST) as run:
        worker, trainer = await run.add(identity(1000)), await run.add(TRAINER)
        for number in range(NEIGHBOURS_WANTED):
            other = await run.add(identity(2000 + number))
            await other.reach(worker.id)
        await worker.reach(trainer.id)
        await trio.sleep(SOME_SECONDS)
        for member in (worker, trainer):
            slots = Slots(member.transport, member.world, member.run.trusts)
            slots.admitted = True
            if member is worker:
                stream = await worker.transport.open_stream(trainer.id, PROTOCOL)
                some = Neighbour(stream, opened=True, range_="", now=0.0)
                slots.neighbours = dict.fromkeys(worker.gossip.neighbours(), some)
            assert not slots.is_refused_by(VALIDATOR.peer_id)
            slots.attempt(VALIDATOR.peer_id).full = True
            slots.opened(VALIDATOR.peer_id)
            await trio.sleep(FULL_SECONDS - 1)
            due = slots.opens_at(VALIDATOR.peer_id) <= member.world.now()
            assert due == (member is trainer) != slots.is_refused_by(VALIDATOR.peer_id)
            await trio.sleep(2 + RETRY_SECONDS)
            assert slots.opens_at(VALIDATOR.peer_id) <= member.world.now()
            assert not slots.is_refused_by(VALIDATOR.peer_id)


async def test_a_slot_lost_at_once_is_asked_for_later_and_later() -> None:
    async with running(MANIFEST) as run:
        keys = sorted((identity(n) for n in (1000, 1001)), key=lambda key: key.peer_id)
        worker, other = [await run.add(key) for key in keys]  # the first one starts
        await worker.reach(other.id)
        stream = await worker.transport.open_stream(other.id, PROTOCOL)
        slots = Slots(worker.transport, worker.world, worker.run.trusts)

        def converse(seconds: float) -> float:
            """How long it waits after a conversation of this length."""
            now = worker.world.now()
            neighbour = Neighbour(stream, opened=True, range_="", now=now - seconds)
            slots.attempt(other.id)
            slots.greeting[other.id] = neighbour
            slots.take(neighbour)
            slots.leave(neighbour)
            return max(0.0, slots.opens_at(other.id) - now)

        assert [converse(0.0) for _ in range(4)] == pytest.approx([1, 2, 4, 8])
        assert converse(LASTING_SECONDS + 1) == 0.0
        assert converse(0.0) == pytest.approx(1)
