"""Pushed files at a validator: one place each, hashed as they come, nobody writes over them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import trio
from blake3 import blake3
from msgspec.structs import replace

from peers.sandbox import SandboxError
from peers.validator.inbox import (
    FOLDER,
    UNANNOUNCED_SECONDS,
    Inbox,
    _Arriving,
    canonical_path_of,
    path_of,
)
from peers.validator.lanes import ATTEMPTS_MAX
from simnet.compute.setting import Hardware
from simnet.compute.validation import InspectorModel
from simnet.simulation import Peer, Plan
from swarm.events import STRANGERS_EVENTS_PER_MINUTE, Event
from swarm.jobs.validation import Grade, Graded
from swarm.node.run_node import RunNode
from swarm.run.run import Run
from swarm.transport import BlobReference, OpenBlob, Refused
from swarm.transport.http.server import BulkServer
from swarm.transport.http.serving import Serving
from swarm.wire.envelope import Envelope
from swarm.wire.identity import PeerId
from swarm.wire.messages import AdmissionRefused, Submission, Verdict
from swarm.world import Sink
from swarm.world.disk import LocalDisk
from tests.network.harness import identity, manifest, sealed_manifest
from tests.shardcast.memory_disk import MemoryDisk
from tests.trainer.runs import RUN, finish, simulated, start_run
from tests.validator.test_numbers import part_of, start_idle
from tests.worlds import VirtualWorld

RUNNER = RUN
GOOD, OTHER = b"judged " * 1000, b"trained" * 1000
OWNER, WORKER = identity(1), identity(2)
REFERENCE = BlobReference(blake3(GOOD).digest(), len(GOOD))


class Pusher:
    """Pushes of one peer, as a transport drives them."""

    def __init__(self, part: RunNode, peer: PeerId) -> None:
        self._part, self._peer = part, peer

    def open(self) -> Sink:
        return self._part.blobs.accept(self._peer, REFERENCE)

    async def end(self, sink: Sink, data: bytes) -> None:
        """The last bytes; what `swarm.transport` does then."""
        sink.write(data)
        piece = sink.finish()
        if piece.verify(REFERENCE.digest):
            await sink.commit(piece)
        else:
            sink.abandon()


async def together(worker: Pusher, other: Pusher) -> None:
    """Two of one digest at once; the wrong one ends last."""
    right, wrong = worker.open(), worker.open()
    await worker.end(right, GOOD)
    await worker.end(wrong, OTHER)


async def half(worker: Pusher, other: Pusher) -> None:
    wrong = worker.open()
    await worker.end(worker.open(), GOOD)
    wrong.write(OTHER[:100])


async def out_of_order(worker: Pusher, other: Pusher) -> None:
    """The right bytes come in two parts around another push's."""
    right, wrong = worker.open(), worker.open()
    right.write(GOOD[:100])
    wrong.write(OTHER[:4000])
    await worker.end(right, GOOD[100:])
    await worker.end(wrong, OTHER[4000:])


async def afterwards(worker: Pusher, other: Pusher) -> None:
    await worker.end(worker.open(), GOOD)
    await worker.end(worker.open(), OTHER)
    await worker.end(worker.open(), GOOD)


async def by_another_peer(worker: Pusher, other: Pusher) -> None:
    before = other.open()
    await worker.end(worker.open(), GOOD)
    await other.end(before, OTHER)
    await other.end(other.open(), OTHER)
    await other.end(other.open(), GOOD)


@pytest.mark.parametrize("attack", [together, half, out_of_order, afterwards, by_another_peer])
async def test_a_file_that_is_here_stays_what_its_digest_says(
    attack: Callable[[Pusher, Pusher], Awaitable[None]],
) -> None:
    async with simulated() as (simulation, _):
        peers = await start_run(simulation, "validator", "trainer", "inference-worker")
        await trio.sleep(10)
        validator, worker = peers["validator"], peers["inference-worker"]
        part = part_of(validator)
        await attack(Pusher(part, worker.id), Pusher(part, peers["trainer"].id))
        path = f"incoming/{REFERENCE.digest.hex()}-{worker.id}.parquet"
        assert await validator.disk.read(path) == GOOD


class Pushes:
    """What a bulk server asks: everybody is this worker."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def admits(self, peer: PeerId | None, credential: bytes) -> bool:
        return True

    def open(self, client: PeerId | None, digest: bytes) -> OpenBlob:
        raise Refused(404, "nothing is served")

    def accept(self, client: PeerId | None, reference: BlobReference) -> Sink:
        return self._inbox.accept(WORKER.peer_id, reference)


@pytest.mark.parametrize("wrong_ends_first", [False, True])
def test_two_puts_of_one_digest_over_http_are_kept_apart(
    tmp_path: Path, wrong_ends_first: bool
) -> None:
    head = b"PUT /blob/%s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (
        REFERENCE.digest.hex().encode(),
        REFERENCE.size_bytes,
    )
    key = (str(WORKER.peer_id), REFERENCE.digest)

    async def main() -> None:
        disk = LocalDisk(tmp_path)
        run = Run(sealed_manifest(OWNER, manifest([OWNER], [OWNER])))
        inbox = Inbox(run, disk, VirtualWorld(1), judged=lambda _: False)
        server = BulkServer(Serving(OWNER.peer_id, disk, lambda: Pushes(inbox)))
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        address = listeners[0].socket.getsockname()
        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(inbox.run)
                nursery.start_soon(server.serve, listeners)
                async with (
                    await trio.open_tcp_stream(*address) as right,
                    await trio.open_tcp_stream(*address) as wrong,
                ):
                    for stream, data in ((right, GOOD), (wrong, OTHER)):
                        await stream.send_all(head + data[:-1])
                    last = [(right, GOOD, b" 204 "), (wrong, OTHER, b" 422 ")]
                    for stream, data, status in reversed(last) if wrong_ends_first else last:
                        await stream.send_all(data[-1:])
                        assert status in await stream.receive_some()
                assert await disk.read(path_of(key)) == GOOD
                assert inbox.size_bytes(key) == len(GOOD)
                nursery.cancel_scope.cancel()

    trio.run(main)


def test_a_file_whose_announcement_is_refused_as_it_is_stored_is_refused_too(
    tmp_path: Path,
) -> None:
    """A worker that announces a file before its push has ended, and wrongly."""
    key = (str(WORKER.peer_id), REFERENCE.digest)

    class Hurried(LocalDisk):
        async def sync(self, path: str) -> None:
            await inbox.remove(key)
            await super().sync(path)

    run = Run(sealed_manifest(OWNER, manifest([OWNER], [OWNER])))
    disk = Hurried(tmp_path)
    inbox = Inbox(run, disk, VirtualWorld(1), judged=lambda _: False)

    async def main() -> None:
        sink = inbox.accept(WORKER.peer_id, REFERENCE)
        sink.write(GOOD)
        with pytest.raises(Refused, match="was refused"):
            await sink.commit(sink.finish())
        assert inbox.size_bytes(key) is None and disk.list("incoming") == []

    trio.run(main)


async def test_a_push_may_take_longer_than_a_file_may_wait_to_be_announced() -> None:
    async with simulated() as (simulation, _):
        peers = await start_run(simulation, "validator", "trainer", "inference-worker")
        await trio.sleep(10)
        disk = peers["validator"].disk
        pusher = Pusher(part_of(peers["validator"]), peers["inference-worker"].id)
        sink = pusher.open()
        for part in range(10):
            await trio.sleep(20)
            sink.write(GOOD[part * 700 : (part + 1) * 700])
        await pusher.end(sink, b"")
        await trio.sleep(50)
        assert REFERENCE.digest.hex() in str(disk.list("incoming")), "not announced yet"
        await trio.sleep(30)
        assert REFERENCE.digest.hex() not in str(disk.list("incoming"))


async def test_a_file_that_was_announced_waits_for_its_verdict_as_long_as_that_takes() -> None:
    async with simulated() as (simulation, _):
        peers = await start_run(simulation, "validator", "trainer", "inference-worker")
        await trio.sleep(10)
        part, worker = part_of(peers["validator"]), peers["inference-worker"].id
        pusher, inbox = Pusher(part, worker), part.blobs.inbox
        assert isinstance(inbox, Inbox)
        await pusher.end(pusher.open(), GOOD)
        inbox.hold((worker, REFERENCE.digest), len(GOOD))
        await trio.sleep(2 * UNANNOUNCED_SECONDS)
        assert await peers["validator"].disk.read(path_of((worker, REFERENCE.digest))) == GOOD


async def test_a_file_that_is_announced_while_another_is_removed_stays() -> None:
    disk, blobs = MemoryDisk(), [b"first " * 100, b"second" * 100]
    run = Run(sealed_manifest(OWNER, manifest([identity(3)], [identity(4)])))
    inbox = Inbox(run, disk, VirtualWorld(), judged=lambda key: False)
    keys = [(WORKER.peer_id, blake3(data).digest()) for data in blobs]
    for data, (worker, digest) in zip(blobs, keys, strict=True):
        sink = inbox.accept(worker, BlobReference(digest, len(data)))
        assert isinstance(sink, _Arriving)
        await disk.allocate(sink.path, len(data))
        sink.write(data)
        await sink.commit(sink.finish())
    disk.before = lambda operation: inbox.hold(keys[1], len(blobs[1]))
    with trio.move_on_after(2 * UNANNOUNCED_SECONDS):
        await inbox.run()
    assert [inbox.exists(key) for key in keys] == [False, True]


async def test_pushes_that_break_off_leave_nothing_and_cost_their_quota_meanwhile() -> None:
    async with simulated() as (simulation, _):
        peers = await start_run(simulation, "validator", "trainer")
        await trio.sleep(10)
        disk = peers["validator"].disk
        pusher = Pusher(part_of(peers["validator"]), peers["trainer"].id)
        before = disk.list("incoming")
        for _ in range(2):
            sinks = [pusher.open() for _ in range(8)]
            with pytest.raises(Refused, match="8 of your submissions") as caught:
                pusher.open()
            assert caught.value.status == 429
            for sink in sinks:
                sink.write(b"part")
                sink.abandon()
            await trio.sleep(0.1)
        assert disk.list("incoming") == before


async def test_an_announcement_repeated_before_its_step_is_known_gives_one_verdict() -> None:
    """It waits for the order a while, and so do its repetitions."""
    async with simulated() as (simulation, said):
        peers = await start_run(simulation, "validator", "trainer", "inference-worker")
        await trio.sleep(10)
        part, validator = part_of(peers["inference-worker"]), peers["validator"].id
        unknown = Submission(
            lineage=0, step=99, policy=0, number=0, digest=REFERENCE.digest, size_bytes=1, groups=1,
            entry=part.entry,
        )  # fmt: skip
        announced = await part.seal(unknown, 600.0)
        assert part.lease is not None and part.lease.admission is not None
        shown = (announced, part.lease.admission)
        answers = []

        async def announce() -> None:
            answers.append(await part.messenger.request(validator, *shown))

        async with trio.open_nursery() as nursery:
            for _ in range(20):
                nursery.start_soon(announce)
        await announce()
        assert {verdict.digest for (verdict,) in answers} == {answers[0][0].digest}
    turned_down = said.named("validator.turned_down")
    assert [fields["failed"] for fields in turned_down] == ["step"]


async def test_announcements_of_what_cannot_be_leave_no_trace_beyond_their_answer() -> None:
    """Any peer that is admitted as a worker can make fifty a second of them."""
    async with simulated() as (simulation, said):
        peers = await start_run(simulation, "validator", "trainer")
        idle, validator = await start_idle(simulation, "liar"), peers["validator"]
        await trio.sleep(20)
        liar = part_of(idle)
        order, lease = liar.step_order(), liar.lease
        assert order is not None and lease is not None and lease.admission is not None
        log = part_of(validator).trusted_part("validator").log_of(validator.id)
        assert log is not None
        before, kept = log.size(), part_of(validator).gossip.kept()
        failed = set()
        for number in range(16):
            file = Submission(
                lineage=0, step=(order.step, 999)[number == 7], policy=order.policy, number=number,
                digest=blake3(b"%d" % number).digest(), size_bytes=1, groups=4,
                run_digest=order.run_digest, entry=b"" if number == 5 else liar.entry,
            )  # fmt: skip
            announced = await liar.seal(file, 600.0)
            answer = await liar.messenger.request(validator.id, announced, lease.admission)
            for no in answer:
                assert isinstance(no.message, Verdict) and no.message.outcome == "refused"
                assert no.message.log_index == -1
                failed.add(no.message.failed)
        assert failed == {"number", "step", "entry"}
        for number in range(10):
            digest = blake3(b"unadmitted %d" % number).digest()
            file = replace(file, step=order.step, digest=digest)
            (no,) = await liar.messenger.request(validator.id, await liar.seal(file, 600.0))
            assert isinstance(no.message, AdmissionRefused)
        await trio.sleep(5)
        assert (log.size(), part_of(validator).gossip.kept()) == (before, kept)
        assert liar.step_order() == order
    names = Counter(said.names())
    for name in ("validator.turned_down", "validator.not_admitted"):
        assert 0 < names[name] <= 2 * STRANGERS_EVENTS_PER_MINUTE


async def test_validators_that_never_hear_each_other_take_a_workers_work_in_turn() -> None:
    async with simulated() as (simulation, said):
        peers = await start_run(
            simulation, "validator", "validator-2", "trainer",
            validators=["validator", "validator-2"],
        )  # fmt: skip
        await trio.sleep(20)
        for other in ("validator", "trainer", "bootstrap"):
            simulation.network.cut(peers["validator-2"].id, simulation.peers[other].id)
        slow = Hardware(tokens_per_second=250.0)
        await simulation.add(Plan("inference-slow", ["inference"], hardware=slow)).start()
        await trio.sleep(200)
    verdicts = [event for event in said if event.name == "validator.verdict"]
    assert len({event.peer for event in verdicts}) == 2
    assert {event.fields["outcome"] for event in verdicts} == {"accepted"}


@pytest.mark.parametrize("lasts", [True, False])
async def test_a_file_that_its_disk_has_changed_is_nobodys_fault(lasts: bool) -> None:
    """Whatever changed it between its arrival and its inspection; it is judged again."""
    async with simulated() as (simulation, said):
        peers = await start_run(simulation, "validator", "trainer")
        disk = peers["validator"].disk
        good: dict[str, bytes] = {}

        def spoil(_: float, __: Peer, event: Event) -> None:
            if event.name == "inference.submission_delivered":
                for name in disk.list("incoming"):
                    simulation.nursery.start_soon(change, f"incoming/{name}")
            elif event.name == "validator.judged_again" and not lasts:
                for path, whole in good.items():
                    disk.put(path, 0, whole)

        async def change(path: str) -> None:
            good[path] = await disk.read(path)
            disk.put(path, 0, b"spoilt")

        simulation.listeners.append(spoil)
        judged = simulation.expect("validator.verdict", ["validator"])
        await simulation.add(Plan("inference-worker", ["inference"])).start()
        assert await simulation.meet(judged, 300)
    verdict = next(event.fields for event in said if event.name == "validator.verdict")
    assert (verdict["outcome"], verdict["failed"]) == (
        ("quarantined", "internal") if lasts else ("accepted", "")
    )
    assert lasts == ("the file has changed since it arrived" in verdict["detail"])


@pytest.mark.parametrize("lasts", [True, False])
async def test_a_sandbox_that_fails_is_asked_again_and_never_the_workers_fault(
    lasts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bytes] = []
    usual = InspectorModel.grade

    async def grade(model: InspectorModel, job: Grade) -> Graded:
        asked.append(job.digest)
        if lasts or len(asked) < ATTEMPTS_MAX:
            raise SandboxError("no memory")
        return await usual(model, job)

    monkeypatch.setattr(InspectorModel, "grade", grade)
    async with simulated() as (simulation, said):
        await start_run(simulation, "validator", "trainer")
        judged = simulation.expect("validator.verdict", ["validator"])
        await simulation.add(Plan("inference-worker", ["inference"])).start()
        assert await simulation.meet(judged, 300)
    again = [event.name for event in said].count("validator.judged_again")
    verdict = next(event.fields for event in said if event.name == "validator.verdict")
    assert (verdict["outcome"], verdict["failed"]) == (
        ("quarantined", "environment") if lasts else ("accepted", "")
    )
    assert lasts == ("no sandbox works on this machine (no memory)" in verdict["detail"])
    assert asked.count(asked[0]) == ATTEMPTS_MAX and again >= ATTEMPTS_MAX - 1


async def test_accepted_rollouts_are_served_in_canonical_form_across_a_restart() -> None:
    """The trainer fetches what the verdict names, and never the worker's file."""
    heard: list[Verdict] = []

    def hear(envelope: Envelope) -> None:
        assert isinstance(envelope.message, Verdict)
        heard.append(envelope.message)

    async with simulated() as (simulation, _):
        peers = await start_run(simulation, "validator", "trainer")
        validator = peers["validator"]
        await trio.sleep(5)
        part_of(validator).gossip.listen(Verdict, hear)
        judged = simulation.expect("validator.verdict", ["validator"])
        await simulation.add(Plan("inference-worker", ["inference"])).start()
        assert await simulation.meet(judged, 300)
        verdict = heard[0]
        assert (verdict.outcome, verdict.rollouts_bytes > 0) == ("accepted", True)
        path = canonical_path_of((verdict.worker, verdict.submission))

        async def served() -> None:
            blob = part_of(validator).blobs.open(None, verdict.rollouts_digest)
            assert (blob.path, blob.size_bytes) == (path, verdict.rollouts_bytes)
            assert blake3(await validator.disk.read(path)).digest() == verdict.rollouts_digest

        await served()
        await validator.crash()
        await validator.start(resume=True)
        await trio.sleep(5)
        await served()


async def test_accepted_files_leave_the_disk_with_their_policy() -> None:
    async with simulated() as (simulation, said):
        names = ("validator", "trainer", "inference-worker")
        peers = await start_run(simulation, *names, steps=12, step_seconds=5.0)
        await finish(simulation)
        part = part_of(peers["validator"])
        oldest = 12 - part.run.max_staleness - 2  # the last removal was at the last checkpoint
        await trio.sleep(10)
        held = peers["validator"].disk.list(FOLDER)
    verdicts = said.named("validator.verdict")
    accepted = [fields for fields in verdicts if fields["outcome"] == "accepted"]
    recent = [fields for fields in accepted if fields["step"] >= oldest]
    assert 0 < len(held) <= 2 * len(recent) < 2 * len(accepted), "a file and its rollouts each"
