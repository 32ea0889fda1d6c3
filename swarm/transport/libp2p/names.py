"""Names of hosts are looked up in threads of their own.

Strangers announce names as addresses. A lookup whose DNS server is silent holds its thread for up
to half a minute, also after the dial was given up. In the threads that trio gives to all, a few
dozen of such names would stop the disk of every peer that dials them.
"""

from __future__ import annotations

import socket
from typing import Any

import trio

LOOKUPS_MAX = 32
"""Lookups at once; further ones wait, for as long as their dial may take."""


class Lookups(trio.abc.HostnameResolver):
    """Looks names up as the system does."""

    def __init__(self) -> None:
        self._threads = trio.CapacityLimiter(LOOKUPS_MAX)

    async def getaddrinfo(self, *given: Any) -> Any:
        """See `socket.getaddrinfo`."""
        return await self._run(socket.getaddrinfo, *given)

    async def getnameinfo(self, *given: Any) -> Any:
        """See `socket.getnameinfo`."""
        return await self._run(socket.getnameinfo, *given)

    async def _run(self, function: Any, *given: Any) -> Any:
        return await trio.to_thread.run_sync(
            function, *given, limiter=self._threads, abandon_on_cancel=True
        )
