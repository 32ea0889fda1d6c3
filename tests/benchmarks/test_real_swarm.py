"""What measurements of running swarms are made of."""

from __future__ import annotations

import os
import socket

from benchmarks.common import spread_of
from benchmarks.real_swarm import Connections, memory_of, open_files, processor_seconds


def test_a_spread_is_the_median_with_the_least_and_the_most() -> None:
    spread = spread_of([3.0, 1.0, 2.004])
    assert (spread.median, spread.least, spread.most, spread.count) == (2.0, 1.0, 3.0, 3)


def test_a_process_is_measured() -> None:
    pid = os.getpid()
    memory = memory_of(pid)
    assert 0 < memory.unshared <= memory.proportional <= memory.resident
    assert processor_seconds(pid) > 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        before, files = Connections([port]).of(pid), open_files(pid)
        with socket.create_connection(("127.0.0.1", port)), server.accept()[0]:
            assert open_files(pid) == files + 2
            assert (before, Connections([port]).of(pid)) == (0, 2)  # both ends are ours
            assert Connections([]).of(pid) == 0
