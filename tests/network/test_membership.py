"""Admission, heartbeats, suspicion and return, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
import trio

from swarm import defaults
from swarm.envelope import Envelope
from swarm.errors import DeadlineError, PeerError
from swarm.membership import NotAdmitted, admits, check_admission
from swarm.messages import (
    Acknowledgement,
    Admission,
    Admissions,
    Eviction,
    Heartbeat,
    Submission,
)
from swarm.run import Run
from swarm.seeds import rendezvous
from tests.network.harness import (
    WALL,
    Member,
    TestRun,
    identity,
    in_virtual_time,
    manifest,
    running,
    sealed,
    sealed_manifest,
)

OWNER, TRAINER, VALIDATOR, WORKER, OTHER = (identity(n) for n in range(1, 6))
TRUSTED = manifest([TRAINER], [VALIDATOR]).trusted_ids()


def run_with(admissions: Admissions | None = None) -> Envelope:
    return sealed_manifest(OWNER, manifest([TRAINER], [VALIDATOR], admissions=admissions))


async def trusted_and_worker(run: TestRun, nursery: trio.Nursery) -> tuple[Member, Member, Member]:
    trainer, validator, worker = [await run.add(key) for key in (TRAINER, VALIDATOR, WORKER)]
    for member in (trainer, validator):
        member.roles = ["trusted"]
        registrar = member.registrar()
        member.granted = registrar  # type: ignore[assignment]
        nursery.start_soon(registrar.run)
    await trainer.reach(validator.id)
    return trainer, validator, worker


def test_admitted_heartbeats_suspected_gone_and_back() -> None:
    async def main() -> None:
        async with running(run_with()) as run, trio.open_nursery() as nursery:
            trainer, validator, worker = await trusted_and_worker(run, nursery)
            lease = worker.lease()
            keeping = trio.CancelScope()

            async def keep(task_status: trio.TaskStatus[None]) -> None:
                with keeping:
                    await lease.keep(task_status=task_status)

            await nursery.start(keep)
            assert lease.admission is not None
            asked = rendezvous(TRUSTED, worker.id.encode())[0]
            assert lease.admission.sender == asked
            registrars = {trainer.id: trainer.granted, validator.id: validator.granted}
            home = registrars.pop(asked)  # type: ignore[arg-type]
            (other,) = registrars.values()
            await trio.sleep(60)
            assert home.live_workers() == [worker.id]  # type: ignore[attr-defined]
            assert other.live_workers() == [worker.id], "presence is shared"  # type: ignore[attr-defined]
            assert {e.body.sequence for e in worker.granted} and len(worker.granted) >= 6

            def standing() -> str:
                present = home.present()  # type: ignore[attr-defined]
                return next(e.standing for e in present if e.peer == worker.id)

            keeping.cancel()
            await trio.sleep(defaults.SUSPECTED_SECONDS + defaults.PRESENCE_SECONDS)
            assert standing() == "suspected"
            await trio.sleep(defaults.GONE_SECONDS - defaults.SUSPECTED_SECONDS)
            assert standing() == "gone"
            await nursery.start(lease.keep)
            await trio.sleep(1)
            assert standing() == "live"
            told = next(m for m in (trainer, validator) if m.id == asked).names()
            for word in ("suspected", "gone", "returned"):
                assert f"membership.peer_{word}" in told
            nursery.cancel_scope.cancel()

    in_virtual_time(main)


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
    assert all(everybody.passes_on(*who) for who in asked)
    message = msgspec.structs.replace(message, broadcast_mode="relay-only")
    relays = Run(sealed_manifest(OWNER, message))
    assert [relays.passes_on(*who) for who in asked] == [True, True, True, False, False]


def test_when_one_trusted_peer_is_silent_the_next_admits() -> None:
    async def main() -> None:
        async with running(run_with()) as run, trio.open_nursery() as nursery:
            *_, worker = await trusted_and_worker(run, nursery)
            first, second = rendezvous(TRUSTED, worker.id.encode())
            run.network.kill(first)  # type: ignore[arg-type]
            lease = worker.lease()
            with trio.fail_after(30):
                await nursery.start(lease.keep)
            assert lease.admission is not None
            assert lease.admission.sender == second
            nursery.cancel_scope.cancel()

    in_virtual_time(main)


def test_an_allow_list_refuses_with_the_reason() -> None:
    async def main() -> None:
        listed = Admissions(policy="allow-list", allowed=[OTHER.peer_id])
        async with running(run_with(listed)) as run, trio.open_nursery() as nursery:
            *_, worker = await trusted_and_worker(run, nursery)
            with pytest.raises(NotAdmitted, match="allow-list"):
                await worker.lease().keep()
            other = await run.add(OTHER)
            await nursery.start(other.lease().keep)
            assert other.granted
            nursery.cancel_scope.cancel()

    in_virtual_time(main)


def test_too_many_unproven_peers_are_refused_until_some_prove_themselves() -> None:
    async def main() -> None:
        async with (
            running(run_with(Admissions(unproven_max=1))) as run,
            trio.open_nursery() as nursery,
        ):
            trainer, validator, worker = await trusted_and_worker(run, nursery)
            await nursery.start(worker.lease().keep)
            await trio.sleep(10)
            late = await run.add(OTHER)
            with pytest.raises(NotAdmitted, match="without a record"):
                await late.lease().keep()
            for member in (trainer, validator):
                member.proven.add(worker.id)
            await nursery.start(late.lease().keep)
            nursery.cancel_scope.cancel()

    in_virtual_time(main)


def test_an_evicted_peer_loses_its_lease() -> None:
    async def main() -> None:
        async with running(run_with()) as run, trio.open_nursery() as nursery:
            trainer, validator, worker = await trusted_and_worker(run, nursery)
            lease = worker.lease()
            for member in (trainer, validator):
                member.gossip.listen(Eviction, member.run.evict)

            async def evict() -> None:
                await trio.sleep(15)
                await validator.announce(Eviction(peer=worker.id, reason="caught"))

            nursery.start_soon(evict)
            with pytest.raises(NotAdmitted, match="caught"):
                await lease.keep()
            nursery.cancel_scope.cancel()

    in_virtual_time(main)


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
    from swarm.run import Run

    run = Run(run_with())
    envelope = sealed(
        signer,  # type: ignore[arg-type]
        Admission(peer=peer.peer_id, roles=["inference"]),  # type: ignore[attr-defined]
        run.id,
        at=at,
        lifetime_seconds=defaults.ADMISSION_LEASE_SECONDS,
    )
    found = check_admission(envelope, run, WORKER.peer_id, WALL)
    assert (found is None) == (problem is None)
    assert problem is None or problem in (found or "")
    assert admits(run, WORKER.peer_id, envelope.raw, WALL) == (problem is None)
    assert not admits(run, None, envelope.raw, WALL)
    assert not admits(run, WORKER.peer_id, b"", WALL)
    assert admits(run, TRAINER.peer_id, b"", WALL), "trusted peers need no admission"


def test_a_peer_whose_clock_is_an_hour_off_says_so_and_is_admitted() -> None:
    async def main() -> None:
        async with running(run_with()) as run, trio.open_nursery() as nursery:
            *_, worker = await trusted_and_worker(run, nursery)
            worker.world.skew_seconds = -3600.0
            with trio.fail_after(60):
                await nursery.start(worker.lease().keep)
            assert "membership.clock_corrected" in worker.names()
            assert abs(worker.world.skew_seconds) < 1
            nursery.cancel_scope.cancel()

    in_virtual_time(main)


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


def test_a_request_is_answered_and_asking_again_gives_the_same_answer() -> None:
    async def main() -> None:
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

    in_virtual_time(main)


def test_nobody_can_send_anothers_message() -> None:
    async def main() -> None:
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
            assert validator.gate.state(worker.id, "heartbeat") is None

    in_virtual_time(main)


def test_a_silent_peer_is_named_at_the_deadline_and_a_dead_one_at_once() -> None:
    async def main() -> None:
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

    in_virtual_time(main)


def test_an_answer_ends_with_the_part_that_gives_it() -> None:
    async def main() -> None:
        async with running(run_with()) as run:
            validator, worker = await run.add(VALIDATOR), await run.add(WORKER)
            begun = trio.Event()
            said: list[str] = []

            async def answer(_e: Envelope, _s: Sequence[Envelope]) -> list[Envelope]:
                begun.set()
                try:
                    await trio.sleep_forever()
                finally:
                    with trio.CancelScope(shield=True):
                        await trio.sleep(1)
                    said.append("the answer has ended")
                return []

            await worker.reach(validator.id)
            request = await worker.seal(submission(1), 600)

            async def ask() -> None:
                assert await worker.messenger.request(validator.id, request) == []

            async with trio.open_nursery() as nursery:
                async with validator.messenger.answering({Submission: answer}):
                    with pytest.raises(ValueError, match="Submission"):
                        async with validator.messenger.answering({Submission: answer}):
                            pass
                    nursery.start_soon(ask)
                    await begun.wait()
                said.append("the part has ended")
            assert said == ["the answer has ended", "the part has ended"]
            await ask()  # nobody is there for it
            async with validator.messenger.answering({Submission: answer}):
                pass

    in_virtual_time(main)
