"""Names that strangers announce: looked up without a share in the threads of the disk."""

from __future__ import annotations

import socket
import threading
from contextlib import AsyncExitStack
from typing import Any

import pytest
import trio
import trio.testing
from multiaddr import Multiaddr

from swarm.transport.libp2p.addresses import resolved
from swarm.transport.libp2p.opening import LOOKUPS_MAX
from tests.transport.harness import ALICE
from tests.transport.test_libp2p_security import Peers

pytestmark = pytest.mark.wall_clock


async def test_names_that_dns_does_not_answer_leave_the_disk_its_threads(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = threading.Event()
    system = socket.getaddrinfo
    asked: list[Any] = []

    def silent(host: Any, port: Any, *given: Any) -> Any:
        if given[-1] & socket.AI_NUMERICHOST:
            return system(host, port, *given)
        asked.append(host)
        answered.wait(10)
        raise socket.gaierror(socket.EAI_AGAIN, "no server answered")

    monkeypatch.setattr(socket, "getaddrinfo", silent)

    async def look_up(number: int) -> None:
        with pytest.raises(OSError):
            await resolved(Multiaddr(f"/dns4/{number}.example.org/tcp/4001"))

    async with AsyncExitStack() as stack:
        await Peers(stack, tmp_path).open(ALICE)
        async with trio.open_nursery() as nursery:
            for number in range(3 * LOOKUPS_MAX):
                nursery.start_soon(look_up, number)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert trio.to_thread.current_default_thread_limiter().borrowed_tokens == 0
            assert 0 < len(asked) <= LOOKUPS_MAX
            answered.set()
        assert len(asked) == 3 * LOOKUPS_MAX
