"""How fast one checkpoint goes from disk to disk over loopback, checked, to one client and to four.

    python -m benchmarks.transfer
    python -m benchmarks.transfer --shardcast FOLDER

Prints one JSON object. The same run measures Swarm (pieces by HTTP, each checked with BLAKE3), the
published shardcast 0.3.2 (shards by wget, joined, the file checked with SHA-256; the requested
version exists, so it never polls), and two loops as bounds: `bare` (sendfile, recv and write
without checks) and `checked` (the same with BLAKE3 of every 512 KiB). Server and clients are
processes. The clock runs from the request to the checked file; CPU seconds are of all processes
together. Each kind is measured once in every round, in turn. Times, and the ratios within a round,
are reported as medians with minimum and maximum. Measure on a quiet machine: `load_average` is of
the minute before.

Before each measurement the memory that it needs is allocated and freed. A virtual machine returns
free memory to its host within a second or two. Writing files into pages that it must request again
costs up to ten times as much, and would measure the machine's last minute.

`--shardcast` (or SHARDCAST_PATH) is the folder of `pip install --target FOLDER shardcast==0.3.2`;
without it `speedup_over_shardcast` is null.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import trio
from blake3 import blake3

from benchmarks.common import at_least, load_average, processor_seconds, spread
from swarm.events import Events
from swarm.shardcast.fetch.fetcher import Fetcher
from swarm.shardcast.service import BlobService
from swarm.shardcast.store import CheckpointStore
from swarm.terminal.output import print_json
from swarm.transport import Source
from swarm.transport.libp2p import open_libp2p
from swarm.wire.identity import Identity
from swarm.wire.messages import Checkpoint, CheckpointReference
from swarm.world.disk import LocalDisk
from swarm.world.machine import Machine

RUN = "benchmark/transfer"
FILE = "model.safetensors"
BUFFER_BYTES = 1 << 20
NO_SHARDCAST = (
    "speedup_over_shardcast is not measured (null): it takes `pip install --target FOLDER "
    "shardcast==0.3.2` and then --shardcast FOLDER"
)


# --- what the processes do -------------------------------------------------------------------


def say(**told: Any) -> None:
    print(json.dumps(told), flush=True)


def wait_for_go() -> None:
    say(ready=True)
    sys.stdin.readline()


async def swarm_server(folder: Path) -> None:
    """Publish `folder`/made and serve it until stdin closes."""
    world, disk, identity = Machine(), LocalDisk(folder), Identity(bytes(32))
    async with open_libp2p(identity, ["/ip4/127.0.0.1/tcp/0"], world=world, disk=disk) as transport:
        store = CheckpointStore(disk, RUN, Events(world, identity.peer_id))
        held = await store.publish("made", 0, 0)
        transport.serve_bulk(BlobService(lambda peer, credential: True, store=store))
        say(
            ready=True,
            root=transport.bulk_addresses()[0],
            peer=identity.peer_id,
            digest=held.digest.hex(),
            manifest_bytes=held.manifest_bytes,
        )
        await trio.to_thread.run_sync(sys.stdin.readline)


async def swarm_client(folder: Path, server: dict[str, Any]) -> None:
    world, disk = Machine(), LocalDisk(folder)
    identity = Identity(os.urandom(32))
    async with open_libp2p(identity, world=world, disk=disk) as transport:
        events = Events(world, identity.peer_id)
        fetcher = Fetcher(world, transport, CheckpointStore(disk, RUN, events), events)
        digest, size = bytes.fromhex(server["digest"]), server["manifest_bytes"]
        reference = CheckpointReference(lineage=0, step=0, digest=digest, size_bytes=size)
        checkpoint = Checkpoint(reference=reference, total_bytes=0)
        source = Source(server["peer"], (server["root"],))
        wait_for_go()
        began = time.perf_counter()
        path = await fetcher.fetch(checkpoint, lambda: [source])
        say(seconds=time.perf_counter() - began, file=str(disk.local_path(f"{path}/{FILE}")))


def bare_server(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, (folder / FILE).open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        say(ready=True, port=listener.getsockname()[1], size=size)
        while True:
            connection, _ = listener.accept()
            # A thread, not a child, whose CPU time would count only once it is waited for.
            threading.Thread(target=send_file, args=(connection, file.fileno(), size)).start()


def send_file(connection: socket.socket, file: int, size: int) -> None:
    with connection:
        done = 0
        while done < size:
            done += os.sendfile(connection.fileno(), file, done, size - done)


def bare_client(folder: Path, server: dict[str, Any]) -> None:
    target = folder / FILE
    wait_for_go()
    began = time.perf_counter()
    buffer = bytearray(BUFFER_BYTES)
    with (
        socket.create_connection(("127.0.0.1", server["port"])) as connection,
        target.open("wb", buffering=0) as file,
    ):
        while count := connection.recv_into(buffer):
            file.write(memoryview(buffer)[:count])
    say(seconds=time.perf_counter() - began, file=str(target))


def checked_client(folder: Path, server: dict[str, Any]) -> None:
    """Fetch like the bare client, and hash every block like a piece."""
    target = folder / FILE
    size, block_bytes = server["size"], 512 * 1024
    wait_for_go()
    began = time.perf_counter()
    buffer = memoryview(bytearray(block_bytes))
    with (
        socket.create_connection(("127.0.0.1", server["port"])) as connection,
        target.open("wb", buffering=0) as file,
    ):
        for start in range(0, size, block_bytes):
            wanted = min(block_bytes, size - start)
            filled = 0
            while filled < wanted:
                filled += connection.recv_into(buffer[filled:wanted])
            blake3(buffer[:wanted]).digest()
            file.write(buffer[:wanted])
    say(seconds=time.perf_counter() - began, file=str(target))


def shardcast_server(folder: Path) -> None:
    import shardcast  # type: ignore[import-not-found]

    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    shardcast.initialize(str(folder / "served"), port)
    (folder / "served/data1.bin").write_bytes(bytes(1 << 20))  # its clients probe with this
    version = shardcast.broadcast(str(folder / FILE))
    say(ready=True, root=f"http://127.0.0.1:{port}", version=version)
    sys.stdin.readline()


def shardcast_client(folder: Path, server: dict[str, Any]) -> None:
    from shardcast import ClientNode

    node = ClientNode([server["root"]], str(folder))
    wait_for_go()
    began = time.perf_counter()
    path = node.download_version(server["version"])
    say(seconds=time.perf_counter() - began, file=path)


PROCESSES: dict[str, Callable[..., Any]] = {
    "swarm-server": lambda *given: trio.run(swarm_server, *given),
    "swarm-client": lambda *given: trio.run(swarm_client, *given),
    "bare-server": bare_server,
    "bare-client": bare_client,
    "checked-server": bare_server,
    "checked-client": checked_client,
    "shardcast-server": shardcast_server,
    "shardcast-client": shardcast_client,
}
"""The processes of the benchmark. A server takes its folder, a client also what its server said."""


# --- the comparison --------------------------------------------------------------------------


@dataclass
class Process:
    popen: subprocess.Popen[str]
    told: dict[str, Any]
    """The first line of JSON that it printed."""

    def hear(self) -> dict[str, Any]:
        return _hear(self.popen)

    def tell(self, what: Any) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(what) + "\n")
        self.popen.stdin.flush()


def _hear(popen: subprocess.Popen[str]) -> dict[str, Any]:
    """Read a process's next line of JSON, skipping log lines."""
    assert popen.stdout is not None
    for line in popen.stdout:
        if line.startswith("{"):
            told: dict[str, Any] = json.loads(line)
            return told
    raise RuntimeError(f"a process of the benchmark ended with status {popen.wait()}")


@contextmanager
def started(
    arguments: list[str], folder: Path, *, library: Path | None = None
) -> Iterator[Process]:
    """Start a process of a benchmark, wait for its first line, and end it after the block."""
    folder.mkdir(parents=True, exist_ok=True)
    path = str(Path.cwd())
    if library is not None:
        # A copy for each process: shardcast keeps a temporary file beside its code.
        path += os.pathsep + str(folder / "library")
        shutil.copytree(library, folder / "library")
    popen = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.transfer", "--folder", str(folder), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=None if library is None else subprocess.DEVNULL,
        text=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    try:
        yield Process(popen, _hear(popen))
    finally:
        assert popen.stdin is not None and popen.stdout is not None
        popen.kill()
        popen.wait()
        popen.stdin.close()
        popen.stdout.close()


def cpu_seconds(process: Process) -> float:
    """User and system time of a process and the children it has waited for."""
    return processor_seconds(process.popen.pid, children=True)


def take_memory(size_bytes: int) -> None:
    """Make the host provide memory, and leave it free for the next measurement."""
    code = (
        "import mmap, sys; mmap.mmap(-1, int(sys.argv[1]), "
        "flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)"
    )
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    subprocess.run([sys.executable, "-c", code, str(min(size_bytes, free // 2))], check=True)


def measure(
    kind: str, clients: int, folder: Path, data: Path, library: Path | None
) -> dict[str, float]:
    """Measure the slowest client's seconds and all CPU seconds per GB, with `clients` at once."""
    there = folder / "server"
    made = there / "made" if kind == "swarm" else there
    made.mkdir(parents=True)
    os.link(data, made / FILE)
    with ExitStack() as stack:
        needs = library if kind == "shardcast" else None
        server = stack.enter_context(started(["--be", f"{kind}-server"], there, library=needs))
        arguments = ["--be", f"{kind}-client", "--server", json.dumps(server.told)]
        all_clients = [
            stack.enter_context(started(arguments, folder / f"client-{n}", library=needs))
            for n in range(clients)
        ]
        # shardcast writes everything twice.
        take_memory((2 * clients + 1) * data.stat().st_size)
        before = [cpu_seconds(process) for process in [server, *all_clients]]
        for client in all_clients:
            client.tell("go")
        results = [client.hear() for client in all_clients]
        after = [cpu_seconds(process) for process in [server, *all_clients]]
        size = data.stat().st_size
        for result in results:
            if not result["file"] or Path(result["file"]).stat().st_size != size:
                raise RuntimeError(f"{kind}: a client has no file")
    shutil.rmtree(folder)
    gigabytes = size * clients / 1e9
    return {
        "seconds": max(result["seconds"] for result in results),
        "cpu_seconds_per_gb": (sum(after) - sum(before)) / gigabytes,
    }


Round = dict[str, dict[str, float]]
"""One measurement of each kind: `seconds` and `cpu_seconds_per_gb`."""


def sum_up(rounds: Sequence[Round], size_bytes: int) -> dict[str, dict[str, float]]:
    """Median and spread of each kind over the rounds, each of which moved `size_bytes`."""
    summed = {}
    for kind in rounds[0]:
        seconds = [each[kind]["seconds"] for each in rounds]
        cpu = [each[kind]["cpu_seconds_per_gb"] for each in rounds]
        summed[kind] = {
            **spread("seconds", seconds),
            "mib_per_second": round(size_bytes / statistics.median(seconds) / 2**20),
            **spread("cpu_seconds_per_gb", cpu),
        }
    return summed


def compare(rounds: Sequence[Round]) -> dict[str, float | None]:
    """Median and spread, over the rounds, of Swarm's speed as a multiple of each other kind's.

    None for a kind that was not measured.
    """
    names = {
        "shardcast": "speedup_over_shardcast",
        "bare": "share_of_bare",
        "checked": "share_of_checked",
    }
    told: dict[str, float | None] = {}
    for kind, name in names.items():
        if kind not in rounds[0]:
            told[name] = None
            continue
        ratios = [each[kind]["seconds"] / each["swarm"]["seconds"] for each in rounds]
        told |= spread(name, ratios, digits=2)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mib", type=at_least(1), default=1024)
    parser.add_argument(
        "--repeat", type=at_least(1), default=5, help="rounds; the median is reported"
    )
    parser.add_argument("--shardcast", type=Path, default=os.environ.get("SHARDCAST_PATH"))
    parser.add_argument("--be", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--server", type=json.loads, default={}, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.be:
        server = [] if arguments.be.endswith("server") else [arguments.server]
        PROCESSES[arguments.be](arguments.folder, *server)
        return
    library = Path(arguments.shardcast) if arguments.shardcast else None
    if library is not None and not (library / "shardcast").is_dir():
        parser.error(f"--shardcast {library} holds no package shardcast")
    if library is None:
        print(NO_SHARDCAST, file=sys.stderr, flush=True)
    told: dict[str, Any] = {
        "mib": arguments.mib,
        "cores": os.cpu_count(),
        "rounds": arguments.repeat,
        "load_average": load_average(),
    }
    with tempfile.TemporaryDirectory(prefix="transfer-") as name:
        data = Path(name) / "data"
        with data.open("wb") as file:
            chance = np.random.default_rng(0)
            for _ in range(arguments.mib):
                file.write(chance.bytes(1 << 20))
        kinds = ["bare", "checked", "swarm", *(["shardcast"] if library is not None else [])]
        for clients in (1, 4):
            # The kinds in turn, so that a busy moment of the machine affects all.
            rounds: list[Round] = []
            for number in range(arguments.repeat):
                figures = {
                    kind: measure(kind, clients, Path(name) / "run", data, library)
                    for kind in kinds
                }
                rounds.append(figures)
                seconds = ", ".join(f"{kind} {figures[kind]['seconds']:.3f} s" for kind in kinds)
                of = f"round {number + 1} of {arguments.repeat}"
                print(f"clients: {clients}, {of}: {seconds}", file=sys.stderr, flush=True)
            told[f"clients_{clients}"] = sum_up(rounds, clients * data.stat().st_size)
            if clients == 1:
                told |= compare(rounds)
    print_json(told)


if __name__ == "__main__":
    main()
