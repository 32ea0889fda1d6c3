"""What measurements of running swarms are made of."""

from __future__ import annotations

import os
import socket

from benchmarks.common import memory_of, processor_seconds, spread_of
from benchmarks.joining import Connections


def test_a_spread_is_the_median_with_the_least_and_the_most() -> None:
    assert spread_of([3.0, 1.0, 2.004]) == {"median": 2.0, "least": 1.0, "most": 3.0, "count": 3}


def test_a_process_is_measured() -> None:
    pid = os.getpid()
    memory = memory_of(pid)
    assert 0 < memory.unshared <= memory.resident
    assert processor_seconds(pid) > 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        before = Connections([port]).of(pid)
        with socket.create_connection(("127.0.0.1", port)), server.accept()[0]:
            assert (before, Connections([port]).of(pid)) == (0, 2)  # both ends are ours
            assert Connections([]).of(pid) == 0
