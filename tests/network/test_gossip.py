"""Gossip: everyone who follows a topic hears of everything, liars and newcomers included."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import trio
from blake3 import blake3

from swarm.errors import PeerError, UserError
from swarm.gossip.gossip import ANSWER_BYTES_PER_TICK, EAGER, OFFERED, OUTBOX_MAX, TICK_SECONDS
from swarm.gossip.slots import NEIGHBOURS_WANTED
from swarm.gossip.store import EVENTS_MAX
from swarm.gossip.topics import PROTOCOL, RUN, WORK, Frame, Have, Hello, Push, Want, decode, encode
from swarm.node.trusted import EVICTION_LIFETIME_SECONDS
from swarm.transport import Stream, StreamError
from swarm.wire.envelope import INVALID_MAX
from swarm.wire.identity import Identity, PeerId
from swarm.wire.messages import (
    Acknowledgement,
    Checkpoint,
    CheckpointReference,
    Eviction,
    Heartbeat,
    LogHead,
    Message,
    Presence,
    StepOrder,
)
from tests.network.harness import (
    Member,
    TestRun,
    identity,
    manifest,
    running,
    sealed,
    sealed_manifest,
)

OWNER, TRAINER, VALIDATOR = (identity(n) for n in range(1, 4))
MANIFEST = sealed_manifest(OWNER, manifest([TRAINER], [VALIDATOR]))


def checkpoint(step: int) -> Checkpoint:
    return Checkpoint(
        reference=CheckpointReference(
            lineage=0, step=step, digest=bytes([step]) * 32, size_bytes=1
        ),
        total_bytes=1,
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


async def test_an_announcement_reaches_everybody_along_a_line() -> None:
    async with running(MANIFEST) as run:
        members = await line_of(run, 10)
        heard = [hears(member, Checkpoint) for member in members]
        for step in (1, 2, 3):
            await members[0].announce(checkpoint(step))
            await trio.sleep(1)
        await trio.sleep(2)
        assert heard == [[checkpoint(1), checkpoint(2), checkpoint(3)]] * len(members)


async def test_a_newcomer_learns_the_newest_states_and_old_evictions() -> None:
    async with running(MANIFEST) as run:
        members = await line_of(run, 2)
        validator = await run.add(VALIDATOR)
        await validator.reach(members[0].id)
        await trio.sleep(3)
        evicted = identity(999).peer_id
        await validator.announce(Eviction(peer=evicted, reason="caught"), EVICTION_LIFETIME_SECONDS)
        for step in range(1, 30):
            await members[0].announce(checkpoint(step))
        await trio.sleep(300)
        newcomer = await run.add(identity(500))
        heard, evictions = hears(newcomer, Checkpoint), hears(newcomer, Eviction)
        await newcomer.reach(members[2].id)
        await trio.sleep(5)
        assert heard == [checkpoint(29)]
        assert [message.peer for message in evictions] == [evicted]  # type: ignore[attr-defined]


async def test_topics_are_not_sent_to_those_who_do_not_follow_them() -> None:
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


async def test_a_lost_connection_heals_and_what_was_missed_arrives() -> None:
    async with running(MANIFEST) as run:
        trainer, other = await line_of(run, 1)
        heard = hears(other, Checkpoint)
        run.network.sever(trainer.id, other.id)
        await trio.sleep(1)
        assert trainer.gossip.neighbours() == []
        await trainer.announce(checkpoint(7))
        run.network.heal(trainer.id, other.id)
        await other.reach(trainer.id)
        await trio.sleep(3)
        assert heard == [checkpoint(7)]


async def all_connected(run: TestRun, count: int) -> list[Member]:
    """The trainer and others, each connected to every other one."""
    members = [await run.add(TRAINER)]
    members += [await run.add(identity(100 + n)) for n in range(count)]
    for left, right in combinations(members, 2):
        await left.reach(right.id)
    await trio.sleep(8)
    return members


def count_pushes(monkeypatch: pytest.MonkeyPatch) -> Counter[type]:
    """The frames that all peers send from now on, by kind."""
    sent: Counter[type] = Counter()

    def counting(frame: Frame) -> bytes:
        sent[type(frame)] += 1
        return encode(frame)

    monkeypatch.setattr("swarm.gossip.topics.encode", counting)
    return sent


@pytest.mark.parametrize("count", [5, 16])
async def test_neighbours_with_another_source_get_no_second_copy_of_routine_announcements(
    monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    async with running(MANIFEST) as run:
        trainer, *others = members = await all_connected(run, count)
        sent = count_pushes(monkeypatch)
        await trainer.announce(checkpoint(1))
        await trio.sleep(3)
        assert sent[Push] > 2 * len(others)  # nobody knows yet who else has a source
        heard = [hears(member, Checkpoint) for member in members]
        sent.clear()
        for step in range(2, 12):
            await trainer.announce(checkpoint(step))
            await trio.sleep(3)
        assert heard == [[checkpoint(step) for step in range(2, 12)]] * len(members)
        assert sent[Push] == 10 * len(others)
        sent.clear()
        gone = Eviction(peer=identity(999).peer_id, reason="caught")
        await trainer.announce(gone, EVICTION_LIFETIME_SECONDS)
        await trio.sleep(3)
        assert sent[Push] > 2 * len(others)  # urgent: from everybody


async def test_heartbeats_are_offered_to_a_few_neighbours_at_a_time_and_reach_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others of the hub's neighbours know only it, so each needs a copy or an offer of it."""
    async with running(MANIFEST) as run:
        hub = await run.add(TRAINER)
        others = [await run.add(identity(100 + n)) for n in range(3 * OFFERED)]
        for other in others:
            await other.reach(hub.id)
        await trio.sleep(8)
        assert len(hub.gossip.neighbours()) == len(others)
        heard = [hears(other, Presence) for other in others]
        sent = count_pushes(monkeypatch)
        await hub.announce(Presence(peers=[]))
        offered = []
        for _ in range(5):
            await trio.sleep(TICK_SECONDS)
            offered.append(sent[Have])
            sent.clear()
        assert heard == [[Presence(peers=[])]] * len(others)
        assert max(offered) <= OFFERED
        assert sum(offered) == len(others) - EAGER


async def test_who_speaks_late_is_heard_by_one_that_has_neighbours_enough() -> None:
    """A peer joins the DHT, for seconds, before it gossips; and the lesser id begins."""
    async with running(MANIFEST) as run:
        enough = NEIGHBOURS_WANTED
        keys = sorted((identity(100 + n) for n in range(enough + 2)), key=lambda key: key.peer_id)
        hub, *others, late = [await run.add(key, speaks=key != keys[-1]) for key in keys]
        for other in [*others, late]:
            await other.reach(hub.id)
        await trio.sleep(8)
        assert hub.gossip.neighbours() == [other.id for other in others]
        await run.speak(late)
        await trio.sleep(15)
        assert late.gossip.neighbours() == [hub.id]


async def beside_a_liar(run: TestRun) -> tuple[Member, Member, Callable[[bytes], None]]:
    """A victim, its neighbour, and what sends an envelope from this to that."""
    victim, liar = await run.add(TRAINER), await run.add(identity(300))
    await liar.reach(victim.id)
    await trio.sleep(3)
    neighbour = next(iter(liar.gossip._slots.neighbours.values()))
    return victim, liar, lambda raw: liar.gossip._post(neighbour, Push(raw))


async def test_a_neighbour_that_sends_forgeries_is_banned() -> None:
    async with running(MANIFEST) as run:
        victim, liar, say = await beside_a_liar(run)
        good = sealed(TRAINER, checkpoint(1), MANIFEST.body.run).raw
        for n in range(INVALID_MAX):
            forged = bytearray(good)
            forged[n] ^= 1
            say(bytes(forged))
        await trio.sleep(3)
        assert "gossip.neighbour_banned" in victim.names()
        assert liar.id not in victim.transport.connected()


@pytest.mark.parametrize("fault", ["expired", "from_the_future", "one_forgery"])
async def test_whoever_passes_on_what_nobody_honest_would_is_banned(fault: str) -> None:
    async with running(MANIFEST) as run:
        victim, _, say = await beside_a_liar(run)
        issued = {"expired": -5000.0, "from_the_future": 5000.0}.get(fault, 0.0)
        for n in range(INVALID_MAX):
            word = checkpoint(1 if fault == "one_forgery" else n)
            raw = bytearray(sealed(TRAINER, word, MANIFEST.body.run, at=issued).raw)
            if fault == "one_forgery":
                raw[0] ^= 1
            say(bytes(raw))
        await trio.sleep(3)
        cause = "bad_signature" if fault == "one_forgery" else fault
        assert victim.gate.dropped[cause] == INVALID_MAX
        assert "gossip.neighbour_banned" in victim.names()
        await trio.sleep(60)
        told = [event.fields for event in victim.seen if event.name == "gossip.dropped"]
        assert told == [{"causes": {cause: INVALID_MAX}}]


async def test_whoever_sends_forged_requests_is_banned() -> None:
    async with running(MANIFEST) as run:
        victim = await run.add(TRAINER)
        liar = await run.add(identity(300))
        await liar.reach(victim.id)
        forged = replace(sealed(TRAINER, checkpoint(1), MANIFEST.body.run), raw=b"no envelope")
        for _ in range(INVALID_MAX):
            assert "messenger.peer_banned" not in victim.names()
            with contextlib.suppress(PeerError):
                assert await liar.messenger.request(victim.id, forged) == []
        await trio.sleep(1)
        assert "messenger.peer_banned" in victim.names()
        assert liar.id not in victim.transport.connected()


async def test_a_peer_whose_own_clock_is_off_bans_nobody() -> None:
    """All that it hears has expired, or is of the future, by a clock that is wrong."""
    async with running(MANIFEST) as run:
        wrong = await run.add(identity(1))
        wrong.world.skew_seconds = 7200.0
        honest = await run.add(identity(300))
        await honest.reach(wrong.id)
        await trio.sleep(3)
        neighbour = next(iter(honest.gossip._slots.neighbours.values()))
        for n in range(2 * INVALID_MAX):
            raw = sealed(TRAINER, checkpoint(n), MANIFEST.body.run).raw
            honest.gossip._post(neighbour, Push(raw))
        await trio.sleep(3)
        assert wrong.gate.dropped["expired"] == 2 * INVALID_MAX
        assert "gossip.neighbour_banned" not in wrong.names()


async def test_what_is_never_gossiped_is_not_remembered_and_counts_against_the_sender() -> None:
    async with running(MANIFEST) as run:
        victim, _, say = await beside_a_liar(run)
        with pytest.raises(UserError, match="Heartbeat messages do not travel by gossip; listen"):
            hears(victim, Heartbeat)
        for n in range(INVALID_MAX):
            invented = sealed(identity(400 + n), Heartbeat(roles=["relay"]), MANIFEST.body.run)
            say(invented.raw)
        await trio.sleep(3)
        assert "gossip.neighbour_banned" in victim.names()
        assert victim.gate.newest(identity(400).peer_id, "heartbeat") is None


def order(step: int) -> StepOrder:
    return StepOrder(
        step=step,
        revision=0,
        checkpoint=CheckpointReference(lineage=0, step=0, digest=bytes(32), size_bytes=1),
        nonce=bytes(32),
        groups_wanted=1,
        submissions_max=1,
    )


async def test_who_comes_back_to_thousands_of_events_hears_the_newest_order_first() -> None:
    """All of them, from neighbours that both hold them, without losing either."""
    async with running(MANIFEST) as run:
        trainer, validator = await run.add(TRAINER), await run.add(VALIDATOR)
        await trainer.reach(validator.id)
        await trio.sleep(3)
        events = [
            Acknowledgement(submission=number.to_bytes(32, "big"), worker=validator.id)
            for number in range(3 * OUTBOX_MAX)
        ]
        for event in events:
            await validator.announce(event)
        await trainer.announce(order(3))
        await trio.sleep(10)
        returned = await run.add(identity(500))
        heard: list[Message] = []
        for kind in (Acknowledgement, StepOrder):
            returned.gossip.listen(kind, lambda envelope: heard.append(envelope.message))
        for neighbour in (trainer, validator):
            await returned.reach(neighbour.id)
        await trio.sleep(10)
        assert heard[0] == order(3)
        assert heard[1] == events[-1]
        assert sorted(map(repr, heard[1:])) == sorted(map(repr, events))
        for member in (trainer, validator, returned):
            assert "gossip.neighbour_lost" not in member.names()
            assert len(member.gossip.neighbours()) == 2


async def speak_alone(run: TestRun, victim: Member) -> Stream:
    """A conversation with a peer, held by the test in place of a peer's gossip."""

    def peer_id(key: Identity) -> PeerId:
        return key.peer_id

    other = await run.add(min(map(identity, range(300, 320)), key=peer_id), speaks=False)
    await other.reach(victim.id)
    stream = await other.transport.open_stream(victim.id, PROTOCOL)
    wall_ms = int(other.world.wall_time() * 1000)
    await stream.send(encode(Hello(run.manifest.body.run, wall_ms, [RUN], [])))
    return stream


async def test_what_a_neighbour_asks_for_again_and_again_is_rationed() -> None:
    """And of what it is not told it gets nothing."""
    async with running(MANIFEST) as run:
        victim = await run.add(TRAINER)
        evictions = [
            await victim.announce(Eviction(peer=identity(n).peer_id, reason="x" * 500))
            for n in range(600, 800)
        ]
        private = await victim.announce(LogHead(size=1, root=bytes(32)))
        stream = await speak_alone(run, victim)
        got = Counter[bytes]()

        async def ask() -> None:
            while True:
                for some in (evictions, [private]):
                    await stream.send(encode(Want([each.digest for each in some])))
                await trio.sleep(0.1)

        async def read() -> None:
            while (raw := await stream.receive()) is not None:
                frame = decode(raw)
                if isinstance(frame, Push):
                    got[blake3(frame.envelope).digest()] += len(raw)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            nursery.start_soon(read)
            await trio.sleep(10.5)
            nursery.cancel_scope.cancel()
        assert {each.digest for each in evictions} == set(got)
        ration = ANSWER_BYTES_PER_TICK
        assert 5 * ration < sum(got.values()) < 12 * ration


async def test_a_neighbour_that_makes_a_peer_ask_and_never_reads_is_dropped() -> None:
    async with running(MANIFEST) as run:
        victim = await run.add(TRAINER)
        stream = await speak_alone(run, victim)
        offers = 2 * OUTBOX_MAX
        with pytest.raises(StreamError):
            for n in range(offers):
                invented = [(n << 9 | k).to_bytes(32, "big") for k in range(512)]
                await stream.send(encode(Have(invented)))
        assert trio.current_time() < 20, "before its reading is given up"
        assert victim.gossip.neighbours() == []


@pytest.mark.slow
async def test_of_many_evictions_a_newcomer_learns_the_newest() -> None:
    """Whoever says them all is heard, however many identities somebody has thrown away."""
    async with running(MANIFEST) as run:
        trainer = await run.add(TRAINER)
        worker = identity(999).peer_id
        for n in range(EVENTS_MAX + 1):
            said = sealed(TRAINER, Eviction(peer=worker, reason=str(n)), MANIFEST.body.run)
            trainer.gossip._accept(said)
        validator = await run.add(VALIDATOR)
        heard = hears(validator, Eviction)
        await validator.reach(trainer.id)
        await trio.sleep(5)
        reasons = [int(each.reason) for each in heard]  # type: ignore[attr-defined]
        assert reasons == list(range(EVENTS_MAX, 0, -1))


async def test_garbage_frames_end_the_conversation_and_nothing_else() -> None:
    async with running(MANIFEST) as run:
        victim = await run.add(TRAINER)
        hostile = await run.add(identity(301))
        await hostile.reach(victim.id)
        for garbage in (b"\xc1", b"\x93\xa5hello", b"\x92\xa4push\xc4\x01x", b"x" * 1000):
            await trio.sleep(5)
            (neighbour,) = hostile.gossip._slots.neighbours.values()
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
