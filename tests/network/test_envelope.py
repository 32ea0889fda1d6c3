"""Envelopes, and the gate that every one from the network must pass."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from swarm.run.run import Run
from swarm.wire.envelope import (
    FUTURE_SECONDS_MAX,
    SEEN_SWEPT_MIN,
    SENDER_RATE_BURST,
    SENDER_RATE_PER_SECOND,
    SENDERS_REMEMBERED_MAX,
    TRUSTED_RATE_BURST,
    TRUSTED_RATE_PER_SECOND,
    UNKNOWN_BYTES_MAX,
    Body,
    Dropped,
    Gate,
    Sequencer,
    open_envelope,
)
from swarm.wire.identity import Identity
from swarm.wire.manifest import RunManifest
from swarm.wire.messages import (
    Acknowledgement,
    Checkpoint,
    CheckpointReference,
    Eviction,
    Heartbeat,
    Message,
    Reinstatement,
    Submission,
    Verdict,
)
from swarm.world.disk import LocalDatabase
from tests.network.harness import identity, in_virtual_time, manifest, sealed, sealed_manifest
from tests.worlds import VirtualWorld

OWNER, TRAINER, VALIDATOR, WORKER = (identity(n) for n in range(1, 5))
MANIFEST = sealed_manifest(OWNER, manifest([TRAINER], [VALIDATOR]))
RUN_ID = MANIFEST.body.run


def checkpoint(step: int, lineage: int = 0) -> Checkpoint:
    return Checkpoint(
        reference=CheckpointReference(lineage=lineage, step=step, digest=bytes(32), size_bytes=10),
        total_bytes=10,
    )


def inside(check: Callable[[Gate, Run], None]) -> None:
    """Run a check at virtual time 0 with a fresh gate."""

    async def main() -> None:
        run = Run(MANIFEST)
        check(Gate(VirtualWorld(1), RUN_ID, run.permits, run.trusts), run)

    in_virtual_time(main)


def refused(gate: Gate, raw: bytes) -> str:
    with pytest.raises(Dropped) as caught:
        gate.admit(raw)
    assert gate.dropped[caught.value.cause] > 0
    return caught.value.cause


def test_what_was_signed_is_what_is_read() -> None:
    message = Heartbeat(roles=["inference"], policy=7, doing="generating")
    envelope = sealed(WORKER, message, RUN_ID)
    opened = open_envelope(envelope.raw)
    assert opened.message == message
    assert opened.sender == WORKER.peer_id
    assert opened.digest == envelope.digest


@given(st.integers(0, 10_000), st.integers(1, 255))
def test_a_changed_byte_is_noticed(position: int, change: int) -> None:
    raw = bytearray(sealed(WORKER, Heartbeat(roles=["inference"]), RUN_ID).raw)
    raw[position % len(raw)] ^= change
    with pytest.raises(Dropped):
        open_envelope(bytes(raw))


def test_the_kind_is_part_of_what_is_signed() -> None:
    """An admission refusal must not pass as another kind with the same fields."""
    envelope = sealed(VALIDATOR, Eviction(peer=WORKER.peer_id, reason="x"), RUN_ID)
    body = envelope.body
    changed = Body(
        body.version,
        "reinstatement",
        body.run,
        body.sender,
        body.sequence,
        body.issued_ms,
        body.expires_ms,
        body.payload,
    )
    raw = envelope.raw[:64] + msgspec.msgpack.encode(changed)
    with pytest.raises(Dropped, match="bad_signature"):
        open_envelope(raw)


@pytest.mark.parametrize(
    ("key", "message", "cause"),
    [
        (TRAINER, checkpoint(1), None),
        (WORKER, checkpoint(1), "not_permitted"),
        (VALIDATOR, checkpoint(1), "not_permitted"),
        (VALIDATOR, Acknowledgement(submission=bytes(32), worker=WORKER.peer_id), None),
        (TRAINER, Acknowledgement(submission=bytes(32), worker=WORKER.peer_id), "not_permitted"),
        (WORKER, Eviction(peer=TRAINER.peer_id, reason="x"), "not_permitted"),
        (WORKER, manifest([WORKER], [WORKER], version=2), "not_permitted"),
        (OWNER, manifest([TRAINER], [VALIDATOR], version=2), None),
    ],
)
def test_only_those_whom_the_manifest_names_may_say_a_kind(
    key: object, message: Message, cause: str | None
) -> None:
    def check(gate: Gate, _run: Run) -> None:
        raw = sealed(key, message, RUN_ID).raw  # type: ignore[arg-type]
        if cause is None:
            assert gate.admit(raw).message == message
        else:
            assert refused(gate, raw) == cause

    inside(check)


def test_the_evicted_are_silenced_and_the_owner_can_take_them_back() -> None:
    def check(gate: Gate, run: Run) -> None:
        run.expel(sealed(VALIDATOR, Eviction(peer=WORKER.peer_id, reason="x"), RUN_ID))
        submission = Submission(
            lineage=0, step=0, policy=0, number=0, digest=bytes(32), size_bytes=1, groups=1
        )
        assert refused(gate, sealed(WORKER, submission, RUN_ID).raw) == "evicted"
        assert gate.admit(sealed(WORKER, Heartbeat(roles=[]), RUN_ID).raw), "to be told why"
        run.expel(sealed(OWNER, Reinstatement(peer=WORKER.peer_id), RUN_ID, at=1, sequence=2))
        assert gate.admit(sealed(WORKER, submission, RUN_ID).raw)

    inside(check)


def test_a_trusted_peer_cannot_be_evicted() -> None:
    run = Run(MANIFEST)
    run.expel(sealed(VALIDATOR, Eviction(peer=TRAINER.peer_id, reason="x"), RUN_ID))
    assert run.evicted(TRAINER.peer_id) is None


def test_time_and_run() -> None:
    def check(gate: Gate, _run: Run) -> None:
        beat = Heartbeat(roles=[])
        assert refused(gate, sealed(WORKER, beat, RUN_ID, at=-1000).raw) == "expired"
        ahead = FUTURE_SECONDS_MAX + 1
        assert refused(gate, sealed(WORKER, beat, RUN_ID, at=ahead).raw) == "from_the_future"
        assert refused(gate, sealed(WORKER, beat, "other/run").raw) == "wrong_run"

    inside(check)


def test_states_only_grow_and_a_trainers_order_by_lineage_and_step() -> None:
    def check(gate: Gate, _run: Run) -> None:
        gate.admit(sealed(TRAINER, checkpoint(5), RUN_ID, sequence=10).raw)
        assert refused(gate, sealed(TRAINER, checkpoint(4), RUN_ID, sequence=11).raw) == "old_state"
        newest = gate.admit(sealed(TRAINER, checkpoint(0, lineage=1), RUN_ID, sequence=1).raw)
        assert gate.newest(TRAINER.peer_id, "checkpoint") == newest.digest

    inside(check)


def test_a_version_signed_twice_is_no_reason_to_refuse_what_is_held() -> None:
    """A step may follow the other content; a peer that keeps both says its own as it starts."""

    def check(gate: Gate, run: Run) -> None:
        other = msgspec.structs.replace(manifest([TRAINER], [VALIDATOR]), checkpoints_kept=9)
        assert refused(gate, sealed_manifest(OWNER, other).raw) == "version_refused"
        run.keep(sealed_manifest(OWNER, other))
        assert gate.admit(MANIFEST.raw)
        assert run.manifest_envelope == MANIFEST

    inside(check)


def test_states_of_those_not_trusted_are_forgotten_when_others_come() -> None:
    """Identities are free; what trusted peers said is never forgotten for them."""

    def check(gate: Gate, _run: Run) -> None:
        gate.admit(sealed(TRAINER, checkpoint(5), RUN_ID).raw)
        for n in range(SENDERS_REMEMBERED_MAX + 1):
            gate.admit(sealed(identity(100 + n), Heartbeat(roles=[]), RUN_ID).raw)
        assert gate.newest(TRAINER.peer_id, "checkpoint") is not None
        assert gate.newest(identity(100).peer_id, "heartbeat") is None
        assert gate.newest(identity(101).peer_id, "heartbeat") is not None

    inside(check)


def test_an_event_counts_once_in_any_order() -> None:
    def check(gate: Gate, _run: Run) -> None:
        events = [
            sealed(
                VALIDATOR,
                Acknowledgement(submission=bytes([n]) * 32, worker=WORKER.peer_id),
                RUN_ID,
                sequence=n,
            ).raw
            for n in (3, 1, 2)
        ]
        for raw in events:
            gate.admit(raw)
        assert [refused(gate, raw) for raw in events] == ["duplicate"] * 3

    inside(check)


async def test_only_events_that_have_not_expired_are_remembered() -> None:
    """Though what came first lasts for a month."""
    world = VirtualWorld(1)
    run = Run(MANIFEST)
    gate = Gate(world, RUN_ID, run.permits, run.trusts)
    lasting = sealed(
        VALIDATOR, Eviction(peer=WORKER.peer_id, reason="x"), RUN_ID, lifetime_seconds=1e6
    ).raw
    gate.admit(lasting)
    for minute in range(30):
        world.skew_seconds = at = 60.0 * minute
        gate.admit(sealed(TRAINER, checkpoint(minute), RUN_ID, at=at, lifetime_seconds=1e6).raw)
        for n in range(100):
            event = Acknowledgement(submission=bytes([n]) * 32, worker=WORKER.peer_id)
            raw = sealed(VALIDATOR, event, RUN_ID, at=at, lifetime_seconds=120).raw
            gate.admit(raw)
    assert len(gate._seen) <= SEEN_SWEPT_MIN
    assert [refused(gate, each) for each in (lasting, raw)] == ["duplicate"] * 2


def test_states_take_no_place_among_the_events() -> None:
    def check(gate: Gate, _run: Run) -> None:
        raw = sealed(TRAINER, checkpoint(5), RUN_ID).raw
        gate.admit(raw)
        assert not gate._seen
        assert refused(gate, raw) == "duplicate"

    inside(check)


@pytest.mark.slow
async def test_a_stranger_over_its_rate_is_dropped_and_recovers() -> None:
    """A trusted sender too, whose rate is generous and whose flood is reported."""
    flooded: list[str] = []
    run = Run(MANIFEST)
    gate = Gate(VirtualWorld(1), RUN_ID, run.permits, run.trusts, flooded=flooded.append)

    def send(key: Identity, number: int) -> bool:
        try:
            gate.admit(sealed(key, Heartbeat(roles=[]), RUN_ID, sequence=number).raw)
        except Dropped as dropped:
            assert dropped.cause == "over_rate"
            return False
        return True

    burst = int(SENDER_RATE_BURST)
    assert sum(send(WORKER, n) for n in range(burst + 50)) == burst
    assert sum(send(TRAINER, n) for n in range(burst + 50)) == burst + 50
    assert flooded == []
    await trio.sleep(1)
    again = sum(send(WORKER, 10_000 + n) for n in range(burst))
    assert again == pytest.approx(SENDER_RATE_PER_SECOND, abs=1)
    most = int(TRUSTED_RATE_BURST)
    accepted = sum(send(TRAINER, 10_000 + n) for n in range(most + 50))
    assert most - burst <= accepted <= most
    assert flooded == [TRAINER.peer_id] * (most + 50 - accepted)
    await trio.sleep(1)
    again = sum(send(TRAINER, 40_000 + n) for n in range(300))
    assert again == pytest.approx(TRUSTED_RATE_PER_SECOND, abs=1)


def padded(key: Identity, message: Message, extra: int) -> bytes:
    """An envelope whose payload ends with an element that nobody knows."""
    made = sealed(key, message, RUN_ID)
    fields = msgspec.msgpack.decode(made.body.payload)
    payload = msgspec.msgpack.encode([*fields, bytes(extra)])
    body = msgspec.msgpack.encode(msgspec.structs.replace(made.body, payload=payload))
    return key.sign(f"swarm/1/{made.body.kind}\0".encode() + body) + body


@pytest.mark.parametrize("message", [Heartbeat(roles=["relay"]), manifest([TRAINER], [VALIDATOR])])
def test_unknown_elements_are_ignored_unless_they_are_a_load(message: Message) -> None:
    most = UNKNOWN_BYTES_MAX
    assert open_envelope(padded(OWNER, message, most - 8)).message == message
    with pytest.raises(Dropped, match=r"malformed: .* bytes that no field explains"):
        open_envelope(padded(OWNER, message, most + 1))


@pytest.mark.parametrize(
    "change", [{"sequence": -1}, {"sequence": 2**63}, {"issued_ms": -1}, {"expires_ms": 2**62}]
)
def test_numbers_that_no_calendar_or_database_holds_are_malformed(change: dict[str, int]) -> None:
    made = sealed(OWNER, Heartbeat(roles=["relay"]), RUN_ID)
    body = msgspec.msgpack.encode(msgspec.structs.replace(made.body, **change))
    with pytest.raises(Dropped, match="malformed"):
        open_envelope(OWNER.sign(f"swarm/1/{made.body.kind}\0".encode() + body) + body)


def test_large_envelopes_of_strangers_are_not_remembered() -> None:
    """A thousand verdicts with thousands of rewards, which a stranger may well sign, would be."""
    rewards = [[0.0] * 64] * 64
    word = Verdict(
        submission=bytes(32), size_bytes=1, worker=WORKER.peer_id, lineage=0, step=0, policy=0,
        number=0, outcome="accepted", rewards=rewards,
    )  # fmt: skip
    raws = [sealed(WORKER, word, RUN_ID, sequence=number).raw for number in range(50)]
    tracemalloc.start()
    for raw in raws:
        open_envelope(raw)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 10 * len(raws[0])


def test_a_verdict_with_too_many_checks_is_malformed() -> None:
    verdict = Verdict(
        submission=bytes(32),
        size_bytes=1,
        worker=WORKER.peer_id,
        lineage=0,
        step=0,
        policy=0,
        number=0,
        outcome="accepted",
        rewards=[[0.0] * 5000],
    )
    with pytest.raises(Dropped, match="malformed"):
        open_envelope(sealed(VALIDATOR, verdict, RUN_ID).raw)


def test_a_manifest_is_bounded_when_decoded() -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(
            msgspec.to_builtins(
                msgspec.structs.replace(manifest([TRAINER], [VALIDATOR]), name="../etc")
            ),
            RunManifest,
        )


def test_sequences_grow_over_restarts_and_clocks_that_go_back(tmp_path: Path) -> None:
    async def main() -> None:
        database, clock = LocalDatabase(tmp_path / "peer.sqlite"), [1000.0]
        await database.transact(lambda connection: connection.execute(Sequencer.TABLE))
        sequencer = Sequencer(database, lambda: clock[0])
        first = [await sequencer.next() for _ in range(100)]
        assert first == sorted(set(first))
        assert database.read("SELECT value FROM sequence ORDER BY id") == [(1_010_000,)]
        clock[0] = 500.0
        restarted = Sequencer(database, lambda: clock[0])
        assert await restarted.next() > first[-1]
        database.close()

    trio.run(main)
