"""Checkpoints by delta between peers: the cheapest chain, and what happens when it breaks."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
import trio

from swarm.shardcast import chain as chain_module
from swarm.shardcast import delta as delta_module
from swarm.shardcast import limits
from swarm.shardcast import sources as sources_module
from swarm.shardcast.fetch import job
from swarm.shardcast.held import Change, Held, delta_key
from swarm.shardcast.manifest import BadManifest, CheckpointManifest, DeltaLink, build, check, parse
from swarm.shardcast.service import BlobService
from swarm.transport import OpenBlob, Refused, Source
from swarm.wire.identity import Identity, PeerId
from swarm.wire.messages import Checkpoint
from swarm.world import ChildDied
from swarm.world.compute import LocalCompute
from tests.memory_network import MemoryNetwork
from tests.shardcast.harness import RUN, InPlace, Peer, announcement, delta_peer, delta_peers
from tests.shardcast.test_delta import changed, safetensors
from tests.shardcast.test_manifest import parsed, raw_manifest
from tests.worlds import VirtualWorld

Files = dict[str, bytes]


@pytest.fixture(autouse=True)
def small_checkpoints_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_module, "DELTA_CHECKPOINT_BYTES_MIN", 1)


def policies(count: int, share: float = 0.01, megabytes: float = 1.5) -> list[Files]:
    """A sharded model after each of `count` steps."""
    rng = random.Random(7)
    shards = [rng.randbytes(int(megabytes * (1 << 19))) for _ in range(2)]
    result = []
    for step in range(count):
        result.append(
            {f"m-{i}.safetensors": safetensors({"w": ("BF16", s)}) for i, s in enumerate(shards)}
            | {"config.json": b"{}", "notes.txt": b"step %d" % step}
        )
        shards = [changed(shard, share, 10 * step + i) for i, shard in enumerate(shards)]
    return result


async def publish(
    peer: Peer, step: int, files: Files, *, mirrors: Sequence[str] = ()
) -> Checkpoint:
    for name, data in files.items():
        await peer.disk.write(f"made/{name}", data)
    assert peer.deltas is not None
    return announcement(await peer.deltas.publish("made", 0, step, mirrors=mirrors))


async def fetch(peer: Peer, checkpoint: Checkpoint, *sources: Peer) -> None:
    with trio.fail_after(20):
        await peer.fetcher.fetch(checkpoint, lambda: [source.source for source in sources])


def holds(peer: Peer, home: Path, step: int, files: Files) -> bool:
    folder = home / f"checkpoints/0-{step}"
    return (0, step) in peer.store.complete() and all(
        (folder / name).read_bytes() == data for name, data in files.items()
    )


def fetched(peer: Peer, step: int) -> int:
    """Bytes of full pieces that came over the network."""
    return sum(
        event.fields["bytes_fetched"]
        for event in peer.events.named("shardcast.checkpoint_complete")
        if event.fields["step"] == step and not event.fields["delta"]
    )


@pytest.mark.wall_clock
async def test_a_peer_catches_up_by_deltas_and_serves_in_full(tmp_path: Path) -> None:
    """The relay has 0 and takes 1 by delta, then 4 by a chain of three; a newcomer gets all of 4
    from the relay alone, though it never received most of its pieces."""
    homes = {name: tmp_path / name for name in ("trainer", "relay", "newcomer")}
    files = policies(5)
    network = MemoryNetwork()
    async with (
        delta_peer(network, 1, homes["trainer"]) as trainer,
        delta_peer(network, 2, homes["relay"]) as relay,
        delta_peer(network, 3, homes["newcomer"]) as newcomer,
    ):
        checkpoints = [await publish(trainer, step, files[step]) for step in range(2)]
        await fetch(relay, checkpoints[0], trainer)
        await fetch(relay, checkpoints[1], trainer)
        assert holds(relay, homes["relay"], 1, files[1])
        checkpoints += [await publish(trainer, step, files[step]) for step in range(2, 5)]
        await fetch(relay, checkpoints[4], trainer)
        assert holds(relay, homes["relay"], 4, files[4])
        assert fetched(relay, 4) < checkpoints[4].total_bytes / 20
        applied = relay.events.named("shardcast.delta_applied")
        assert [event.fields["deltas"] for event in applied] == [1, 3]
        await fetch(newcomer, checkpoints[4], relay)
        assert holds(newcomer, homes["newcomer"], 4, files[4])
        assert not newcomer.events.named("shardcast.delta_applied")


@pytest.mark.wall_clock
async def test_deltas_of_a_manifest_that_is_not_trusted_are_not_fetched(tmp_path: Path) -> None:
    files = policies(2)
    async with delta_peers(MemoryNetwork(), tmp_path, 2) as (trainer, worker):
        await fetch(worker, await publish(trainer, 0, files[0]), trainer)
        checkpoint = await publish(trainer, 1, files[1])
        with trio.fail_after(20):
            await worker.fetcher.fetch(checkpoint, lambda: [trainer.source], plain=True)
        assert holds(worker, tmp_path / "2", 1, files[1])
        assert not worker.events.named("shardcast.delta_applied")


@pytest.mark.wall_clock
async def test_a_relay_passes_deltas_on(tmp_path: Path) -> None:
    files = policies(2)
    network = MemoryNetwork()
    async with delta_peers(network, tmp_path, 3) as (trainer, relay, worker):
        for step in range(2):
            checkpoint = await publish(trainer, step, files[step])
            await fetch(relay, checkpoint, trainer)
            await fetch(worker, checkpoint, relay)
        assert holds(worker, tmp_path / "3", 1, files[1])
        assert fetched(worker, 1) < checkpoint.total_bytes / 20


@pytest.mark.parametrize("how", ["gone", "corrupt", "the child dies", "changed shapes", "dense"])
def test_a_broken_chain_falls_back_to_the_full_pieces(tmp_path: Path, how: str) -> None:
    files = policies(2)
    if how == "dense":
        for name in ("m-0.safetensors", "m-1.safetensors"):
            raw = random.Random(name).randbytes(int(1.5 * (1 << 19)))
            files[1][name] = safetensors({"w": ("BF16", raw)})
    if how == "changed shapes":
        files[1]["m-1.safetensors"] = safetensors({"w": ("BF16", bytes(1 << 19))})

    def die(method: str) -> None:
        if how == "the child dies" and method == "make":
            raise ChildDied("delta was killed by SIGKILL", "delta")

    async def main() -> None:
        network = MemoryNetwork()
        async with (
            delta_peer(network, 1, tmp_path / "1") as trainer,
            delta_peer(network, 2, tmp_path / "2", compute=InPlace(die)) as worker,
        ):
            checkpoints = [await publish(trainer, step, files[step]) for step in range(2)]
            delta = trainer.store.held(delta_key((0, 1)))
            assert (delta is None) == (how == "dense")
            if how == "gone":
                await trainer.store.withdraw(delta_key((0, 1)))
            elif how == "corrupt":  # the trainer's own disk: its pieces do not hash right
                path = tmp_path / "1/checkpoints/0-1.delta/delta"
                path.write_bytes(bytes(path.stat().st_size))
            await fetch(worker, checkpoints[0], trainer)
            await fetch(worker, checkpoints[1], trainer)
            assert holds(worker, tmp_path / "2", 1, files[1])
            failed = worker.events.named("shardcast.delta_failed")
            assert len(failed) == (how in ("gone", "corrupt", "the child dies"))
            assert fetched(worker, 1) > checkpoints[1].total_bytes * 0.4

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain_module, "DELTA_STALL_SECONDS", 0.5)
        patch.setattr(sources_module, "SOURCE_CORRUPT_SECONDS", 0.1)
        trio.run(main)


class PacedDelta(BlobService):
    """Sends a delta's pieces no faster than so many seconds for all of them; everything else as it
    is asked for. Tells `left` how many have not gone yet."""

    def __init__(self, peer: Peer, delta: Held, seconds: float, left: Callable[[int], None]):
        super().__init__(lambda peer, credential: True, store=peer.store)
        self._unsent = {piece.digest for piece in delta.manifest.pieces}
        self._between_seconds = seconds / len(self._unsent)
        self._next_at = 0.0
        self._tell_left = left

    def open(self, client: PeerId | None, digest: bytes) -> OpenBlob:
        if digest in self._unsent:
            if trio.current_time() < self._next_at:
                raise Refused(404, "not yet")
            self._next_at = trio.current_time() + self._between_seconds
            self._unsent.discard(digest)
            self._tell_left(len(self._unsent))
        return super().open(client, digest)


@pytest.mark.parametrize(
    ("how", "delta_seconds", "seconds_max", "reason"),
    [
        ("nobody has it", 0, 61, r"no piece of the delta to step 1 .* 60 s \(no manifest here\)"),
        pytest.param(
            "it stops in the middle",
            400,
            280,
            r"no piece of the .* 60 s \(\d+ of \d+ pieces here\)",
            marks=pytest.mark.slow,
        ),
        ("it trickles", 4000, 905, r"the delta to checkpoint 0/1 was not fetched within 9\d\d s"),
        ("it is slow but steady", 800, 900, None),
    ],
    ids=["nobody has it", "it stops", "it trickles", "it is slow but steady"],
)
async def test_a_delta_that_does_not_come_leaves_time_for_the_full_pieces(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
    delta_seconds: float,
    seconds_max: float,
    reason: str | None,
) -> None:
    """With the times of 62 GB and a delta of a 96th, and the deadline of a whole fetch."""
    files = policies(2, share=0.05)
    # Enough pieces for a trickle; and nothing that a clock that jumps would not wait for.
    monkeypatch.setattr(limits, "PIECE_BYTES_MIN", 1024)
    monkeypatch.setattr(delta_module, "DELTA_BLOCK_BYTES", 1024)
    monkeypatch.setattr("swarm.world.disk.INLINE_BYTES_MAX", 1 << 30)
    network = MemoryNetwork()
    async with (
        delta_peer(network, 1, tmp_path / "1") as trainer,
        delta_peer(network, 2, tmp_path / "2") as keeper,
        delta_peer(network, 3, tmp_path / "3") as worker,
        network.transport(
            Identity(bytes(31) + b"4"), world=VirtualWorld(), disk=keeper.disk
        ) as slow,
    ):
        checkpoints = [await publish(trainer, step, files[step]) for step in range(2)]
        for checkpoint in checkpoints:
            await fetch(keeper, checkpoint, trainer)
        await fetch(worker, checkpoints[0], trainer)
        await trainer.store.withdraw(delta_key((0, 1)))
        delta = keeper.store.held(delta_key((0, 1)))
        assert delta is not None and delta.complete and len(delta.pieces) > 100
        share = delta.manifest.total_bytes / (62e9 / 96)
        slowest = job.PIECE_BYTES_PER_SECOND_MIN * share
        monkeypatch.setattr(job, "PIECE_BYTES_PER_SECOND_MIN", slowest)
        half = len(delta.pieces) // 2

        def stop(left: int) -> None:
            if how == "it stops in the middle" and left == half:
                network.cut(worker.transport.peer_id, slow.peer_id)

        slow.serve_bulk(PacedDelta(keeper, delta, delta_seconds, stop))
        sources = [trainer.source]
        if how != "nobody has it":
            sources.append(Source(slow.peer_id, tuple(slow.bulk_addresses())))
        began = trio.current_time()
        await worker.fetcher.fetch(checkpoints[1], lambda: sources)
        assert trio.current_time() - began < seconds_max
        assert holds(worker, tmp_path / "3", 1, files[1])
        failed = worker.events.named("shardcast.delta_failed")
        if reason is None:
            assert not failed and worker.events.named("shardcast.delta_applied")
            assert fetched(worker, 1) < checkpoints[1].total_bytes / 20
        else:
            assert re.search(reason, failed[0].fields["reason"])
            assert fetched(worker, 1) > checkpoints[1].total_bytes * 0.9


@pytest.mark.wall_clock
async def test_a_disk_that_fails_while_a_delta_is_fetched_costs_the_delta_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = policies(2)
    network = MemoryNetwork()
    async with delta_peers(network, tmp_path, 2) as (trainer, worker):
        checkpoints = [await publish(trainer, step, files[step]) for step in range(2)]
        await fetch(worker, checkpoints[0], trainer)
        allocate = worker.disk.allocate

        async def fail(path: str, size_bytes: int) -> None:
            if path.endswith(".delta/delta"):
                raise OSError(5, "Input/output error")
            await allocate(path, size_bytes)

        monkeypatch.setattr(worker.disk, "allocate", fail)
        await fetch(worker, checkpoints[1], trainer)
        assert holds(worker, tmp_path / "2", 1, files[1])
        (failed,) = worker.events.named("shardcast.delta_failed")
        assert failed.fields["reason"] == "[Errno 5] Input/output error"


@pytest.mark.wall_clock
async def test_a_wrong_delta_never_shows(tmp_path: Path) -> None:
    """The trainer signs a delta that leads elsewhere: no piece comes out right, all are fetched."""
    files = policies(3)
    network = MemoryNetwork()
    async with delta_peers(network, tmp_path, 2) as (trainer, worker):
        first = await publish(trainer, 0, files[0])
        await publish(trainer, 1, files[1])
        wrong = trainer.store.held(delta_key((0, 1)))
        assert wrong is not None
        link = DeltaLink(
            0,
            first.reference.digest,
            wrong.digest,
            wrong.manifest_bytes,
            wrong.manifest.total_bytes,
        )
        for name, data in files[2].items():
            await trainer.disk.write(f"made/{name}", data)
        manifest = await build(trainer.disk, "made", run=RUN, lineage=0, step=2)
        manifest = msgspec.structs.replace(manifest, deltas=[link])
        held = await trainer.store.publish("made", 0, 2, manifest=manifest)
        await fetch(worker, first, trainer)
        await fetch(worker, announcement(held), trainer)
        assert holds(worker, tmp_path / "2", 2, files[2])
        assert fetched(worker, 2) > held.manifest.total_bytes * 0.9


@pytest.mark.wall_clock
async def test_what_the_disk_loses_while_a_delta_is_applied_is_fetched(tmp_path: Path) -> None:
    files = policies(2)
    network = MemoryNetwork()
    async with delta_peers(network, tmp_path, 2) as (trainer, worker):
        checkpoints = [await publish(trainer, step, files[step]) for step in range(2)]
        await fetch(worker, checkpoints[0], trainer)
        spoilt = 0

        def spoil(change: Change, held: Held, index: int) -> None:
            nonlocal spoilt
            if change is Change.PIECE and held.key == (0, 1) and not spoilt:
                spoilt = held.manifest.pieces[index].size_bytes
                path = tmp_path / "2" / held.piece_path(index)
                data = bytearray(path.read_bytes())
                data[held.manifest.pieces[index].offset] ^= 1
                path.write_bytes(data)

        worker.store.watch(spoil)
        await fetch(worker, checkpoints[1], trainer)
        assert holds(worker, tmp_path / "2", 1, files[1])
        (lost,) = worker.events.named("shardcast.pieces_lost")
        assert lost.fields["pieces"] == 1
        assert spoilt and fetched(worker, 1) >= spoilt


@pytest.mark.wall_clock
async def test_a_delta_to_files_of_another_sha256_is_refused(tmp_path: Path) -> None:
    files = policies(2)
    network = MemoryNetwork()
    async with delta_peers(network, tmp_path, 2) as (trainer, worker):
        first = await publish(trainer, 0, files[0])
        made = await publish(trainer, 1, files[1])
        honest = trainer.store.held((0, 1))
        assert honest is not None and honest.digest == made.reference.digest
        *rest, last = honest.manifest.files
        lying = msgspec.structs.replace(
            honest.manifest, files=[*rest, msgspec.structs.replace(last, sha256=bytes(32))]
        )
        await trainer.store.withdraw((0, 1))
        for name, data in files[1].items():
            await trainer.disk.write(f"made/{name}", data)
        held = await trainer.store.publish("made", 0, 1, manifest=lying)
        await fetch(worker, first, trainer)
        with pytest.raises(BadManifest, match="does not have the SHA-256"):
            await fetch(worker, announcement(held), trainer)
        assert worker.store.complete() == [(0, 0)]


def test_killed_while_applying_it_goes_on_where_it_was(tmp_path: Path) -> None:
    """The child dies after some of the calls and the peer with it; at the next start nothing half
    made counts as a checkpoint, what was made is kept, and the delta is not fetched again."""
    files = policies(2)

    class Killed(BaseException):
        """kill -9."""

    calls = 0

    def kill(method: str) -> None:
        nonlocal calls
        calls += method == "make"
        if calls == 4:
            raise Killed

    async def main() -> None:
        network = MemoryNetwork()
        async with delta_peer(network, 1, tmp_path / "1") as trainer:
            checkpoints = [await publish(trainer, step, files[step]) for step in range(2)]
            with pytest.raises(BaseExceptionGroup) as stopped:
                async with delta_peer(network, 2, tmp_path / "2", compute=InPlace(kill)) as worker:
                    await fetch(worker, checkpoints[0], trainer)
                    await fetch(worker, checkpoints[1], trainer)
            assert stopped.group_contains(Killed)
            async with delta_peer(network, 2, tmp_path / "2") as worker:
                assert worker.store.complete() == [(0, 0)]
                held = worker.store.held((0, 1))
                assert held is not None
                assert 0 < len(held.missing()) < len(held.pieces) - 2
                await fetch(worker, checkpoints[1], trainer)
                assert holds(worker, tmp_path / "2", 1, files[1])
                received = worker.events.named("shardcast.piece_received")
                assert sum(event.fields["bytes"] for event in received) < 1000
                assert len(worker.events.named("shardcast.delta_applied")) == 1

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chain_module, "DELTA_BYTES_PER_CALL", 1)
        trio.run(main)


@pytest.mark.wall_clock
async def test_a_real_child_encodes_and_applies(tmp_path: Path) -> None:
    files = policies(2)
    network = MemoryNetwork()
    async with (
        delta_peer(network, 1, tmp_path / "1", compute=LocalCompute()) as trainer,  # type: ignore[arg-type]
        delta_peer(network, 2, tmp_path / "2", compute=LocalCompute()) as worker,  # type: ignore[arg-type]
    ):
        for step in range(2):
            await fetch(worker, await publish(trainer, step, files[step]), trainer)
        assert holds(worker, tmp_path / "2", 1, files[1])
        assert worker.events.named("shardcast.delta_applied")


@pytest.mark.wall_clock
async def test_publishing_again_and_keeping_what_chains_need(tmp_path: Path) -> None:
    files = policies(13)
    network = MemoryNetwork()
    async with delta_peer(network, 1, tmp_path) as trainer:
        for step in range(13):
            last = await publish(trainer, step, files[step])
        assert trainer.store.complete() == [(0, step) for step in range(8, 13)]
        deltas = [held.key[1] for held in trainer.store.all() if held.is_delta]
        assert deltas == list(range(13 - limits.DELTA_CHAIN_MAX, 13))
        # The same again changes nothing, whatever its base would be now.
        assert await publish(trainer, 12, files[12]) == last
    async with delta_peer(network, 1, tmp_path) as trainer:
        assert [held.key[1] for held in trainer.store.all() if held.is_delta] == deltas
        newest = trainer.store.held((0, 12))
        assert newest is not None and len(newest.manifest.deltas) == limits.DELTA_CHAIN_MAX


@pytest.mark.wall_clock
async def test_a_relay_keeps_the_last_five_and_what_live_chains_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "DELTA_CHAIN_MAX", 6)
    last = 7
    files = policies(last + 1, megabytes=0.6)
    network = MemoryNetwork()
    async with delta_peers(network, tmp_path, 3) as (trainer, relay, late):
        for step in range(last + 1):
            checkpoint = await publish(trainer, step, files[step])
            await fetch(relay, checkpoint, trainer)
            if step == last - limits.DELTA_CHAIN_MAX:
                await fetch(late, checkpoint, trainer)
        assert fetched(relay, last) < 5000  # manifest and notes.txt
        kept = range(last - 4, last + 1)
        assert relay.store.complete() == [(0, step) for step in kept]
        newest = relay.store.held((0, last))
        assert newest is not None
        live = {link.manifest for link in newest.manifest.deltas}
        deltas = [held for held in relay.store.all() if held.is_delta]
        assert {held.digest for held in deltas} == live
        assert len(live) == limits.DELTA_CHAIN_MAX
        folders = [f"0-{step}" for step in kept] + [f"0-{d.key[1]}.delta" for d in deltas]
        there = sorted(path.name for path in (tmp_path / "2/checkpoints").iterdir())
        assert there == sorted(folders)
        # So a peer as far behind as a chain reaches catches up through the relay alone.
        await fetch(late, checkpoint, relay)
        assert holds(late, tmp_path / "3", last, files[last])
        assert fetched(late, last) < 5000


# --- hostile chains --------------------------------------------------------------------------


def _manifest(*links: DeltaLink) -> CheckpointManifest:
    manifest = parsed(raw_manifest({"a": 7}))
    return msgspec.structs.replace(manifest, step=9, deltas=list(links))


def _link(base_step: int, base: int, manifest: int) -> DeltaLink:
    return DeltaLink(base_step, bytes([base]) * 32, bytes([manifest]) * 32, 100, 1000)


@pytest.mark.parametrize(
    ("links", "reason"),
    [
        ([_link(9, 1, 2)], "from step 9 to 9, so it has a cycle"),
        ([_link(8, 1, 2), _link(8, 3, 4)], "from step 8 to 8, so it has a cycle"),
        ([_link(7, 1, 2), _link(8, 3, 4)], "from step 7 to 8, so it has a cycle"),
        ([_link(8, 1, 2), _link(7, 1, 4)], "names one manifest twice"),
        ([_link(8, 1, 2), _link(7, 2, 4)], "names one manifest twice"),
        ([_link(8 - i, 2 * i, 2 * i + 1) for i in range(9)], "9 deltas, more than the 8"),
    ],
)
def test_hostile_chains_are_refused_in_one_sentence(links: list[DeltaLink], reason: str) -> None:
    with pytest.raises(BadManifest, match=reason) as refused:
        parse(_manifest(*links).encode())
    assert "\n" not in str(refused.value)


def test_an_honest_chain_is_accepted() -> None:
    check(_manifest(_link(8, 1, 2), _link(5, 3, 4)))
