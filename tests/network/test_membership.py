"""Admission, heartbeats, suspicion and return, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Literal

import msgspec
import pytest
import trio

from swarm.errors import DeadlineError, PeerError
from swarm.rollouts.seeds import rendezvous
from swarm.run.admission import ADMISSION_LEASE_SECONDS, NotAdmitted, admits, check_admission
from swarm.run.lease import GOODBYE_SECONDS, LeaseKeeper
from swarm.run.members import GONE_SECONDS, PRESENCE_BYTES_MAX, PRESENCE_SECONDS, SUSPECTED_SECONDS
from swarm.run.registrar import ANSWERS_BURST, SHARED_SECONDS, Registrar
from swarm.run.run import Run
from swarm.wire.envelope import Envelope
from swarm.wire.identity import Identity, PeerId
from swarm.wire.manifest import Admissions
from swarm.wire.messages import (
    Acknowledgement,
    Admission,
    AdmissionRefused,
    Eviction,
    Heartbeat,
    PeerRecord,
    Presence,
    Submission,
)
from swarm.wire.messenger import first
from tests.network.harness import (
    Member,
    TestRun,
    identity,
    manifest,
    running,
    sealed,
    sealed_manifest,
)
from tests.worlds import WALL

OWNER, TRAINER, VALIDATOR, WORKER, OTHER = (identity(n) for n in range(1, 6))
TRUSTED = manifest([TRAINER], [VALIDATOR]).trusted_ids()


def run_with(admissions: Admissions | None = None) -> Envelope:
    return sealed_manifest(OWNER, manifest([TRAINER], [VALIDATOR], admissions=admissions))


async def trusted_and_worker(run: TestRun) -> tuple[Member, Member, Member]:
    trainer, validator, worker = [await run.add(key) for key in (TRAINER, VALIDATOR, WORKER)]
    for member in (trainer, validator):
        member.roles = ["trusted"]
        member.transport.keep_many()
        registrar = member.registrar()
        member.granted = registrar  # type: ignore[assignment]
        run.nursery.start_soon(registrar.run)
    await trainer.reach(validator.id)
    return trainer, validator, worker


async def test_admitted_heartbeats_suspected_gone_and_back() -> None:
    async with running(run_with()) as run:
        trainer, validator, worker = await trusted_and_worker(run)
        lease = worker.lease()
        keeping = trio.CancelScope()

        async def keep(task_status: trio.TaskStatus[None]) -> None:
            with keeping:
                await lease.keep(task_status=task_status)

        await run.nursery.start(keep)
        assert lease.admission is not None
        asked = rendezvous(TRUSTED, worker.id.encode())[0]
        assert lease.admission.sender == asked
        registrars = {trainer.id: trainer.granted, validator.id: validator.granted}
        home = registrars.pop(asked)  # type: ignore[arg-type, call-overload]
        (other,) = registrars.values()
        await trio.sleep(60)
        assert home.live_workers() == [worker.id]  # type: ignore[attr-defined]
        assert other.live_workers() == [worker.id], "presence is shared"  # type: ignore[attr-defined]
        assert {e.body.sequence for e in worker.granted} and len(worker.granted) >= 6

        def standing() -> str:
            present = home.present()  # type: ignore[attr-defined]
            return next(e.standing for e in present if e.peer == worker.id)

        keeping.cancel()
        await trio.sleep(SUSPECTED_SECONDS + PRESENCE_SECONDS)
        assert standing() == "suspected"
        await trio.sleep(GONE_SECONDS - SUSPECTED_SECONDS)
        assert standing() == "gone"
        await run.nursery.start(lease.keep)
        await trio.sleep(1)
        assert standing() == "live"
        told = next(m for m in (trainer, validator) if m.id == asked).names()
        for word in ("suspected", "gone", "returned"):
            assert f"membership.peer_{word}" in told


@pytest.mark.parametrize("leaving", ["left", "finished"])
async def test_a_goodbye_is_heard_at_once_and_replaying_it_changes_nothing(
    leaving: Literal["left", "finished"],
) -> None:
    async with running(run_with()) as run:
        trainer, validator, worker = await trusted_and_worker(run)
        thief = await run.add(OTHER)
        lease = worker.lease()
        keeping = await run.nursery.start(partial(kept, lease))
        assert lease.admission is not None

        def states() -> set[str]:
            return {
                entry.state
                for member in (trainer, validator)
                for entry in member.granted.present()  # type: ignore[attr-defined]
                if entry.peer == worker.id
            }

        await trio.sleep(PRESENCE_SECONDS)
        assert states() == {"live"}
        keeping.cancel()
        worker.leaving = leaving
        goodbye = await worker.seal(worker.describe(), 600.0)
        home = lease.admission.sender
        assert await worker.messenger.request(PeerId(home), goodbye, lease.admission)
        await trio.sleep(PRESENCE_SECONDS)
        assert states() == {leaving}
        await lease.say_goodbye()  # once more
        await trio.sleep(PRESENCE_SECONDS)
        told = trainer.names() + validator.names()
        assert told.count(f"membership.peer_{leaving}") == 1
        assert not {"membership.peer_gone", "membership.peer_returned"} & set(told)

        worker.leaving = ""
        await run.nursery.start(partial(kept, lease))
        for sender in (worker, thief):
            await sender.reach(PeerId(home))
            assert await sender.messenger.request(PeerId(home), goodbye) == []
        await trio.sleep(PRESENCE_SECONDS)
        assert states() == {"live"}
        assert "membership.peer_returned" in trainer.names() + validator.names()


async def kept(lease: LeaseKeeper, *, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
    """Keep a lease until the scope that the task starts with is cancelled."""
    with trio.CancelScope() as scope:
        async with trio.open_nursery() as nursery:
            await nursery.start(lease.keep)
            task_status.started(scope)


async def test_a_trusted_peer_says_goodbye_to_all_others() -> None:
    async with running(run_with()) as run:
        trainer, validator, _ = await trusted_and_worker(run)
        await trio.sleep(2 * PRESENCE_SECONDS)

        def state() -> str:
            present = validator.granted.present()  # type: ignore[attr-defined]
            return next(e.state for e in present if e.peer == trainer.id)

        assert state() == "live"
        trainer.leaving = "left"
        await trainer.granted.publish_presence()  # type: ignore[attr-defined]
        await trainer.gossip.flush()
        await trio.sleep(1)
        assert state() == "left"


async def test_a_goodbye_waits_for_no_silent_trusted_peer() -> None:
    async with running(run_with()) as run:
        trainer, validator, worker = await trusted_and_worker(run)
        lease = worker.lease()
        (await run.nursery.start(partial(kept, lease))).cancel()
        for member in (trainer, validator):
            run.network.cut(worker.id, member.id)
        began = trio.current_time()
        await lease.say_goodbye()
        assert trio.current_time() - began <= GOODBYE_SECONDS


def test_the_mode_says_who_passes_checkpoints_on() -> None:
    message = manifest([TRAINER], [VALIDATOR])
    asked = [
        (TRAINER.peer_id, ["trainer"]),
        (VALIDATOR.peer_id, []),
        (OTHER.peer_id, ["relay", "bootstrap"]),
        (WORKER.peer_id, ["inference"]),
        (WORKER.peer_id, ["observer"]),
    ]
    everybody = Run(sealed_manifest(OWNER, message))
    assert all(everybody.serves(*who) for who in asked)
    message = msgspec.structs.replace(message, broadcast_mode="relay-only")
    relays = Run(sealed_manifest(OWNER, message))
    assert [relays.serves(*who) for who in asked] == [True, True, True, False, False]


async def test_when_one_trusted_peer_is_silent_the_next_admits() -> None:
    async with running(run_with()) as run:
        *_, worker = await trusted_and_worker(run)
        first, second = rendezvous(TRUSTED, worker.id.encode())
        run.network.kill(first)  # type: ignore[arg-type]
        lease = worker.lease()
        with trio.fail_after(30):
            await run.nursery.start(lease.keep)
        assert lease.admission is not None
        assert lease.admission.sender == second
        await trio.sleep(300)
        tried = worker.names().count("membership.trusted_silent")
        assert 4 <= tried <= 6, "a heartbeat every 10 s does not begin with who is silent"


async def test_an_allow_list_refuses_with_the_reason() -> None:
    listed = Admissions(policy="allow-list", allowed=[OTHER.peer_id])
    async with running(run_with(listed)) as run:
        *_, worker = await trusted_and_worker(run)
        with pytest.raises(NotAdmitted, match="allow-list"):
            await worker.lease().keep()
        other = await run.add(OTHER)
        await run.nursery.start(other.lease().keep)
        assert other.granted


async def test_too_many_unproven_peers_are_refused_until_some_prove_themselves() -> None:
    async with running(run_with(Admissions(unproven_max=1))) as run:
        trainer, validator, worker = await trusted_and_worker(run)
        await run.nursery.start(worker.lease().keep)
        await trio.sleep(10)
        late = await run.add(OTHER)
        with trio.move_on_after(60):
            await late.lease().keep()
            raise AssertionError("there was no place")
        assert late.granted == []
        told = [e.fields["reason"] for e in late.seen if e.name.endswith("waiting_for_place")]
        assert len(told) == 1 and "without a record" in told[0]
        for member in (trainer, validator):
            member.stakes[worker.id] = 4096
        await run.nursery.start(late.lease().keep)


async def test_an_evicted_peer_loses_its_lease() -> None:
    async with running(run_with()) as run:
        trainer, validator, worker = await trusted_and_worker(run)
        lease = worker.lease()
        for member in (trainer, validator):
            member.gossip.listen(Eviction, member.run.expel)

        async def evict() -> None:
            await trio.sleep(15)
            await validator.announce(Eviction(peer=worker.id, reason="caught"))

        run.nursery.start_soon(evict)
        with pytest.raises(NotAdmitted, match="caught"):
            await lease.keep()


@pytest.mark.parametrize(
    ("signer", "peer", "at", "problem"),
    [
        (VALIDATOR, WORKER, 0, None),
        (TRAINER, WORKER, 0, None),
        (WORKER, WORKER, 0, "not signed by a trusted peer"),
        (VALIDATOR, OTHER, 0, "another peer"),
        (VALIDATOR, WORKER, -61, "expired"),
    ],
)
def test_what_makes_an_admission_valid(
    signer: object, peer: object, at: float, problem: str | None
) -> None:
    from swarm.run.run import Run

    run = Run(run_with())
    envelope = sealed(
        signer,  # type: ignore[arg-type]
        Admission(peer=peer.peer_id, roles=["inference"]),  # type: ignore[attr-defined]
        run.id,
        at=at,
        lifetime_seconds=ADMISSION_LEASE_SECONDS,
    )
    found = check_admission(envelope, run, WORKER.peer_id, WALL)
    assert (found is None) == (problem is None)
    assert problem is None or problem in (found or "")
    assert admits(run, WORKER.peer_id, envelope.raw, WALL) == (problem is None)
    assert not admits(run, None, envelope.raw, WALL)
    assert not admits(run, WORKER.peer_id, b"", WALL)
    assert admits(run, TRAINER.peer_id, b"", WALL), "trusted peers need no admission"


async def test_a_peer_whose_clock_is_an_hour_off_says_so_and_is_admitted() -> None:
    async with running(run_with()) as run:
        *_, worker = await trusted_and_worker(run)
        worker.world.skew_seconds = -3600.0
        with trio.fail_after(60):
            await run.nursery.start(worker.lease().keep)
        assert "membership.clock_corrected" in worker.names()
        assert abs(worker.world.skew_seconds) < 1


VALIDATOR_2 = identity(7)


@pytest.mark.parametrize("off", [600.0, -600.0])
@pytest.mark.parametrize("wrong", ["trainer", "validator"])
async def test_of_two_trusted_clocks_that_differ_each_peer_keeps_its_own(
    wrong: str, off: float
) -> None:
    """And all go on: a worker is admitted, everybody hears everybody, leases count."""
    async with running(run_with()) as run:
        trainer, validator, worker = [await run.add(key) for key in (TRAINER, VALIDATOR, WORKER)]
        odd = trainer if wrong == "trainer" else validator
        odd.world.skew_seconds = off
        for member in (trainer, validator):
            member.roles = ["trusted"]
            member.granted = member.registrar()  # type: ignore[assignment]
            run.nursery.start_soon(member.granted.run)  # type: ignore[attr-defined]
        await trainer.reach(validator.id)
        await worker.reach(trainer.id)
        await worker.reach(validator.id)
        lease = worker.lease()
        with trio.fail_after(60):
            await run.nursery.start(lease.keep)
        await trio.sleep(120)
        assert [trainer.world.skew_seconds, validator.world.skew_seconds] == [
            off if wrong == "trainer" else 0.0,
            off if wrong == "validator" else 0.0,
        ]
        for member, other in ((trainer, validator), (validator, trainer)):
            told = [e for e in member.seen if e.name == "membership.clocks_differ"]
            assert [e.fields["remote"] for e in told] == [other.id], "said once"
            assert "membership.clock_corrected" not in member.names()
            present = member.granted.present()  # type: ignore[attr-defined]
            assert {p.peer for p in present if p.standing == "live"} == {
                trainer.id,
                validator.id,
                worker.id,
            }
            assert lease.admission is not None
            assert admits(member.run, worker.id, lease.admission.raw, member.world.wall_time()), (
                "whoever signed it"
            )
        heard: list[Envelope] = []
        trainer.gossip.listen(Acknowledgement, heard.append)
        await validator.announce(
            Acknowledgement(submission=bytes(32), worker=worker.id), lifetime_seconds=60
        )
        await trio.sleep(5)
        assert len(heard) == 1


async def test_of_three_trusted_clocks_the_odd_one_is_corrected() -> None:
    message = manifest([TRAINER], [VALIDATOR, VALIDATOR_2])
    async with running(sealed_manifest(OWNER, message)) as run:
        members = [await run.add(key) for key in (TRAINER, VALIDATOR, VALIDATOR_2)]
        members[1].world.skew_seconds = 900.0
        for number, member in enumerate(members):
            for other in members[:number]:
                await member.reach(other.id)
        await trio.sleep(30)
        assert [abs(member.world.skew_seconds) < 1 for member in members] == [True] * 3
        assert [m.names().count("membership.clock_corrected") for m in members] == [0, 1, 0]


# --- the messenger under it ----------------------------------------------------------------------


def submission(number: int) -> Submission:
    return Submission(
        lineage=0,
        step=0,
        policy=0,
        number=number,
        digest=bytes([number]) * 32,
        size_bytes=1,
        groups=1,
    )


async def test_a_request_is_answered_and_asking_again_gives_the_same_answer() -> None:
    async with running(run_with()) as run:
        validator, worker = await run.add(VALIDATOR), await run.add(WORKER)
        calls: list[int] = []

        async def answer(envelope: Envelope, extra: Sequence[Envelope]) -> list[Envelope]:
            message = envelope.message
            assert isinstance(message, Submission)
            calls.append(len(extra))
            reply = Acknowledgement(submission=message.digest, worker=envelope.sender)
            return [await validator.seal(reply, 60)]

        await worker.reach(validator.id)
        request = await worker.seal(submission(1), 60)
        async with validator.messenger.answering({Submission: answer}):
            for _ in range(2):
                (reply,) = await worker.messenger.request(validator.id, request, request)
                assert isinstance(reply.message, Acknowledgement)
                assert reply.message.submission == bytes([1]) * 32
        assert calls == [1, 1]


async def test_nobody_can_send_anothers_message() -> None:
    async with running(run_with()) as run:
        validator, worker, thief = [await run.add(k) for k in (VALIDATOR, WORKER, OTHER)]

        async def answer(_e: Envelope, _s: Sequence[Envelope]) -> list[Envelope]:
            raise AssertionError("must not be reached")

        stolen = await worker.seal(submission(1), 60)
        await thief.reach(validator.id)
        async with validator.messenger.answering({Submission: answer}):
            assert await thief.messenger.request(validator.id, stolen) == []
        # Nor is anything remembered of it: strangers could be invented without end.
        invented = await worker.seal(Heartbeat(roles=["relay"]), 60)
        assert await thief.messenger.request(validator.id, invented) == []
        assert validator.gate.newest(worker.id, "heartbeat") is None


async def test_nothing_is_remembered_of_a_request_that_nobody_answers() -> None:
    """A stranger may sign any state with any of its keys: who it is and where, say."""
    async with running(run_with()) as run:
        validator, stranger = await run.add(VALIDATOR), await run.add(OTHER)
        await stranger.reach(validator.id)
        record = sealed(OTHER, PeerRecord(roles=["relay"], addresses=[]), "")
        beat = await stranger.seal(Heartbeat(roles=["relay"]), 60)
        for unasked in (record, beat):
            assert await stranger.messenger.request(validator.id, unasked) == []
            assert validator.gate.newest(stranger.id, unasked.body.kind) is None


async def test_nothing_is_remembered_of_peers_that_are_gone() -> None:
    """A validator that tries to hand each stranger its verdict after it has left, say."""
    async with running(run_with()) as run:
        validator, worker = await run.add(VALIDATOR), await run.add(WORKER)
        await worker.reach(validator.id)
        request = await worker.seal(submission(1), 600)
        asked = [validator.id, Identity(bytes([99]) * 32).peer_id]
        run.network.kill(validator.id)
        for peer in asked:
            for _ in range(2):
                with pytest.raises(PeerError):
                    await worker.messenger.request(peer, request)
        assert not worker.messenger._opening


async def test_a_silent_peer_is_named_at_the_deadline_and_a_dead_one_at_once() -> None:
    async with running(run_with()) as run:
        validator, worker = await run.add(VALIDATOR), await run.add(WORKER)

        async def never(_e: Envelope, _s: Sequence[Envelope]) -> list[Envelope]:
            await trio.sleep_forever()
            return []

        await worker.reach(validator.id)
        request = await worker.seal(submission(1), 600)

        async def die() -> None:
            await trio.sleep(1)
            run.network.kill(validator.id)

        async with (
            validator.messenger.answering({Submission: never}),
            trio.open_nursery() as nursery,
        ):
            with pytest.raises(DeadlineError, match=validator.id):
                await worker.messenger.request(validator.id, request, deadline_seconds=5)
            nursery.start_soon(die)
            before = trio.current_time()
            with pytest.raises(PeerError, match=validator.id):
                await worker.messenger.request(validator.id, request, deadline_seconds=60)
            assert trio.current_time() - before < 5


# --- identities cost nothing ---------------------------------------------------------------------


def stranger(number: int) -> Identity:
    return identity(1_000 + number)


async def ask(
    member: Member, trusted: Member, roles: list[str], *, padded: bool = False
) -> AdmissionRefused | None:
    """Say a heartbeat as a member that follows no rule; the refusal, if that is the answer."""
    await member.reach(trusted.id)
    words = "🙂" * (80 if padded else 0)
    beat = await member.seal(Heartbeat(roles=roles, doing=words, bytes_sent=2**53), 120.0)
    replies = await member.messenger.request(trusted.id, beat)
    refusal = first(replies, AdmissionRefused)
    assert refusal is not None or first(replies, Admission) is not None, "some answer is due"
    return refusal.message if refusal is not None else None  # type: ignore[return-value]


async def admission(
    member: Member, trusted: Member, *shown: Envelope, role: str = "inference"
) -> Envelope:
    """Say a heartbeat; the admission that it is answered with."""
    await member.reach(trusted.id)
    beat = await member.seal(Heartbeat(roles=[role]), 120.0)
    found = first(await member.messenger.request(trusted.id, beat, *shown), Admission)
    assert found is not None
    return found


async def entry(member: Member, trusted: Member, role: str = "inference") -> bytes:
    return (await admission(member, trusted, role=role)).expect(Admission).entry


@pytest.mark.slow
async def test_hundreds_of_peers_with_long_words_are_all_told_of_page_by_page() -> None:
    count = 400
    admissions = Admissions(unproven_max=4 * count, further_roles=["x" * 20, "y" * 20])
    async with running(run_with(admissions)) as run:
        trainer, validator, _ = await trusted_and_worker(run)
        digests: list[Envelope] = []
        trainer.gossip.listen(Presence, digests.append)
        registrar: Registrar = validator.granted  # type: ignore[assignment]
        crowd = [await run.add(stranger(n), speaks=False) for n in range(count)]
        roles = ["inference", *["x" * 20] * 4, *["y" * 20] * 3]
        for member in crowd:
            await member.reach(validator.id)
        for member in crowd:
            assert await ask(member, validator, roles, padded=True) is None
        began = len(digests)
        await trio.sleep(SUSPECTED_SECONDS)
        assert all(len(e.raw) <= PRESENCE_BYTES_MAX + 1024 for e in digests)
        told = {
            p.peer
            for e in digests[began:]
            if e.sender == validator.id
            for p in e.message.peers  # type: ignore[attr-defined]
        }  # type: ignore[attr-defined]
        assert told == {validator.id, *(member.id for member in crowd)}
        others = trainer.granted.present()  # type: ignore[attr-defined]
        assert told <= {entry.peer for entry in others}, "the pages add up"
        assert all(len(p.heartbeat.doing) <= 40 for p in registrar.present())


@pytest.mark.parametrize(
    ("roles", "reason"),
    [
        ([], "no peer without a role"),
        (["trainer"], "no role 'trainer'"),
        (["inference", "king"], "no role 'king'"),
        (["archive"], None),
    ],
)
async def test_a_run_admits_the_roles_it_knows(roles: list[str], reason: str | None) -> None:
    known = Admissions(further_roles=["archive"])
    async with running(run_with(known)) as run:
        _, validator, worker = await trusted_and_worker(run)
        refusal = await ask(worker, validator, roles)
        assert (refusal is None) == (reason is None)
        assert refusal is None or ((reason or "") in refusal.reason and not refusal.later)


@pytest.mark.parametrize("role", ["inference", "observer"])
async def test_a_crowd_of_one_network_leaves_room_for_others(role: str) -> None:
    """Keys in numbers come first, from one /24, which may hold 8 of the run's 24 slots."""
    admissions = Admissions(unproven_max=24, helpers_max=24, range_max=8)
    async with running(run_with(admissions)) as run:
        trainer, validator, worker = await trusted_and_worker(run)
        crowd = [await run.add(stranger(n), speaks=False) for n in range(20)]
        for member in crowd:
            trainer.networks[member.id] = validator.networks[member.id] = "203.0.113.0"
        admitted: set[str] = set()
        answer = None
        for _ in range(4):
            for trusted in (trainer, validator):
                for member in crowd:
                    answer = await ask(member, trusted, [role])
                    admitted |= set() if answer else {member.id}
            await trio.sleep(SHARED_SECONDS)
        assert len(admitted) == 8, "however many trusted peers it asks"
        assert answer is not None and answer.later
        assert "of your network (203.0.113.0)" in answer.reason
        validator.networks[worker.id] = "198.51.100.0"
        assert await ask(worker, validator, [role]) is None


@pytest.mark.parametrize("role", ["inference", "observer"])
async def test_idle_identities_shut_nobody_out(role: str) -> None:
    """They come first, from many networks, without deadline: a quarter of the slots stays free."""
    admissions = Admissions(unproven_max=16, helpers_max=16, range_max=8, trial_seconds=1e6)
    async with running(run_with(admissions)) as run:
        trainer, validator, worker = await trusted_and_worker(run)
        crowd = [await run.add(stranger(n), speaks=False) for n in range(24)]
        for member in crowd:
            for trusted in (trainer, validator):
                await member.reach(trusted.id)
        held: set[str] = set()
        for _ in range(5):
            for number, member in enumerate(crowd):
                for trusted in (trainer, validator):
                    trusted.networks[member.id] = f"203.0.{number % 4}.0"
                    if await ask(member, trusted, [role]) is None:
                        held.add(member.id)
            await trio.sleep(SHARED_SECONDS)
        assert len(held) == 12
        for number in range(4):
            newcomer = worker if number == 0 else await run.add(stranger(30 + number))
            trainer.networks[newcomer.id] = f"198.51.{number}.0"
            assert await ask(newcomer, trainer, [role]) is None
            await trio.sleep(SHARED_SECONDS)


@pytest.mark.parametrize("role", ["inference", "observer"])
async def test_an_identity_holds_one_slot_wherever_it_asks(role: str) -> None:
    admissions = Admissions(unproven_max=4, helpers_max=4)
    async with running(run_with(admissions)) as run:
        trainer, validator, worker = await trusted_and_worker(run)
        other = await run.add(OTHER, speaks=False)
        for _ in range(5):
            for trusted in (trainer, validator):
                assert await ask(worker, trusted, [role]) is None
            await trio.sleep(SHARED_SECONDS)
        assert await ask(other, trainer, [role]) is None, "3 of 4 slots are not reserved"


async def test_a_flood_of_heartbeats_costs_few_signatures() -> None:
    async with running(run_with()) as run:
        _, validator, worker = await trusted_and_worker(run)
        await worker.reach(validator.id)
        answers = 0
        for _ in range(200):
            beat = await worker.seal(Heartbeat(roles=["inference"]), 120.0)
            answers += len(await worker.messenger.request(validator.id, beat))
            await trio.sleep(0.03)
        assert answers <= ANSWERS_BURST + 12
        await trio.sleep(10)
        assert await ask(worker, validator, ["inference"]) is None, "and it recovers"


async def test_two_trusted_peers_together_keep_to_the_bound() -> None:
    admissions = Admissions(unproven_max=11)
    async with running(run_with(admissions)) as run:
        trainer, validator, _ = await trusted_and_worker(run)
        held: set[str] = set()
        crowd = [await run.add(stranger(n), speaks=False) for n in range(60)]
        for member in crowd:
            for trusted in (trainer, validator):
                await member.reach(trusted.id)
        for member in crowd:
            for trusted in (trainer, validator):
                if await ask(member, trusted, ["inference"]) is None:
                    held.add(member.id)
                    break
            await trio.sleep(0.5)
        assert len(held) == 9, "11, less the reserved quarter"


@pytest.mark.parametrize("told", [True, False])
async def test_a_member_is_no_newcomer_at_another_trusted_peer(told: bool) -> None:
    """Which knows its lease from the first one's digest or, if that came not, from the member."""
    admissions = Admissions(unproven_max=1)
    async with running(run_with(admissions)) as run:
        trainer, validator, worker = await trusted_and_worker(run)
        other = await run.add(OTHER, speaks=False)
        lease = await admission(worker, trainer)
        assert await ask(other, validator, ["inference"]) is not None, "the run is full"
        if told:
            await trio.sleep(2 * PRESENCE_SECONDS)
        run.network.kill(trainer.id)
        renewed = await admission(worker, validator, *([] if told else [lease]))
        assert renewed.message == lease.message, "since the same time, with the same entry"


async def test_the_entry_is_drawn_at_the_admission_and_kept() -> None:
    """Not by the peer, which could make its key to suit, nor anew when it leaves and returns."""
    async with running(run_with()) as run:
        trainer, validator, worker = await trusted_and_worker(run)
        other = await run.add(OTHER, speaks=False)

        drawn = await entry(worker, trainer)
        assert len(drawn) == 16 and drawn != await entry(other, trainer)
        await trio.sleep(2 * PRESENCE_SECONDS)
        assert await entry(worker, validator) == drawn, "everybody knows it"
        await trio.sleep(15 * GONE_SECONDS)
        assert await entry(worker, trainer) == drawn, "even if nobody remembers it"


async def test_an_id_has_a_draw_for_each_trusted_peer_that_it_asks_at_once() -> None:
    """In one slot, and only until the next digests: then all of them show the earlier entry."""
    async with running(run_with()) as run:
        trainer, validator, worker = await trusted_and_worker(run)

        drawn = {await entry(worker, each) for each in (trainer, validator)}
        assert len(drawn) == 2
        await trio.sleep(2 * PRESENCE_SECONDS)
        (kept,) = {await entry(worker, each) for each in (trainer, validator)}
        assert kept in drawn
        await trio.sleep(2 * PRESENCE_SECONDS)
        assert {await entry(worker, each) for each in (trainer, validator)} == {kept}


async def test_only_the_slot_of_a_worker_shows_an_entry() -> None:
    """Else identities could be tried out in the slots of helpers, of which there are more."""
    admissions = Admissions(unproven_max=2, helpers_max=2)
    async with running(run_with(admissions)) as run:
        trainer, validator, worker = await trusted_and_worker(run)

        assert await entry(worker, trainer, "observer") == b""
        await trio.sleep(SHARED_SECONDS)
        drawn = await entry(worker, validator)
        assert len(drawn) == 16, "an observer that becomes a worker"
        await trio.sleep(SHARED_SECONDS)
        assert await entry(worker, trainer) == drawn, "not that of the older slot"
        await trio.sleep(SHARED_SECONDS)
        assert await entry(worker, trainer, "observer") == drawn
        await trio.sleep(SHARED_SECONDS)
        second, third = [await run.add(stranger(n), speaks=False) for n in range(2)]
        assert await ask(second, trainer, ["inference"]) is None
        full = await ask(third, trainer, ["inference"])
        assert full is not None and full.later, "a worker's slot stays one for its lease"
        assert await ask(third, trainer, ["observer"]) is None


async def test_who_delivers_nothing_gives_its_place_to_one_that_waits() -> None:
    async with running(run_with(Admissions(unproven_max=2))) as run:
        trainer, validator, worker = await trusted_and_worker(run)
        idle, busy = [await run.add(stranger(n), speaks=False) for n in (1, 2)]
        assert await ask(idle, trainer, ["inference"]) is None
        await trio.sleep(SHARED_SECONDS)
        for second in range(0, 580, 10):
            trainer.stakes[busy.id] = min(1 + second // 100, 7)
            assert await ask(idle, trainer, ["inference"]) is None
            assert await ask(busy, trainer, ["inference"]) is None
            await trio.sleep(10)
        trainer.has_work = False
        for _ in range(100):
            await ask(idle, trainer, ["inference"])
            await ask(busy, trainer, ["inference"])
            await trio.sleep(10)
        assert await ask(worker, trainer, ["inference"]) is not None, "it may still deliver"
        trainer.has_work = True
        for _ in range(2):
            await ask(busy, trainer, ["inference"])
            await ask(idle, trainer, ["inference"])
            await trio.sleep(10)
        assert await ask(worker, trainer, ["inference"]) is None
        await trio.sleep(2 * PRESENCE_SECONDS)
        for trusted in (trainer, validator):
            assert await ask(idle, trusted, ["inference"]) is not None, "everybody knows"
        assert await ask(busy, validator, ["inference"]) is None


async def test_what_is_remembered_of_identities_that_come_and_go_is_bounded() -> None:
    async with running(run_with(Admissions(unproven_max=8, helpers_max=8))) as run:
        _, validator, _ = await trusted_and_worker(run)
        registrar: Registrar = validator.granted  # type: ignore[assignment]
        for number in range(120):
            member = await run.add(stranger(number), speaks=False)
            await ask(member, validator, ["observer" if number % 2 else "inference"])
            run.network.kill(member.id)
            await trio.sleep(5)
            assert len(registrar.present()) <= 2 + 4 * 8


async def test_an_admission_that_nobody_renews_is_granted_again() -> None:
    """So that bulk servers, which are not shown every renewal, see the newest one."""
    async with running(run_with()) as run:
        trainer, validator, worker = await trusted_and_worker(run)
        lease = worker.lease()
        await run.nursery.start(lease.keep)
        await trio.sleep(25)
        assert len({envelope.digest for envelope in worker.granted}) == 3
        for trusted in (trainer, validator):
            run.network.kill(trusted.id)
        await trio.sleep(20)
        assert worker.granted[-1] is worker.granted[-2] is lease.admission
        assert len({envelope.digest for envelope in worker.granted}) == 3
