"""UPnP: asks a gateway for ports in a child process (`igd.py`)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated

import msgspec
import trio
from msgspec import Meta

from swarm.terminal.untrusted import printable
from swarm.transport.port_maps import igd
from swarm.transport.port_maps.gateway import Gateway, Granted, MapRefused

SECONDS_MAX = igd.SECONDS_MAX + 5.0
"""The child ends itself before this, but for a machine that is very busy."""


OUTPUT_BYTES_MAX = 4096


class Said(msgspec.Struct):
    """What the child prints."""

    ports: dict[str, Annotated[int, Meta(ge=1, le=65535)]] = {}
    refused: str = ""


_said = msgspec.json.Decoder(Said).decode


class Upnp:
    """Asks by UPnP."""

    name = "UPnP"

    async def map(self, gateway: Gateway, ports: Mapping[int, int], seconds: int) -> Granted:
        """See `Router.map`."""
        said = await self._ask("map", gateway, ports, seconds)
        granted = {inside: said.ports[str(inside)] for inside in ports if str(inside) in said.ports}
        if not granted:
            raise MapRefused("it grants no port")
        return Granted(granted, seconds)

    async def unmap(self, gateway: Gateway, ports: Mapping[int, int]) -> None:
        """See `Router.unmap`."""
        await self._ask("unmap", gateway, ports, 0)

    async def _ask(
        self, action: str, gateway: Gateway, ports: Mapping[int, int], seconds: int
    ) -> Said:
        command = [sys.executable, "-I", igd.__file__, action, gateway.host, gateway.own]
        pairs = [f"{inside}:{outside}" for inside, outside in ports.items()]
        with trio.move_on_after(SECONDS_MAX):
            said = _said_in(await _output([*command, str(seconds), *pairs]))
            if said.refused:
                raise MapRefused(printable(said.refused))
            return said
        raise MapRefused("it does not answer")


async def _output(command: Sequence[str]) -> bytes:
    """What a program prints, at most `OUTPUT_BYTES_MAX` of it. The program ends with this call."""
    async with trio.open_nursery() as nursery:
        process = await nursery.start(
            partial(
                trio.run_process,
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                check=False,
            )
        )
        printed = b""
        while len(printed) < OUTPUT_BYTES_MAX:
            part = await process.stdout.receive_some(OUTPUT_BYTES_MAX)
            if not part:
                break
            printed += part
        nursery.cancel_scope.cancel()
    return printed


def _said_in(printed: bytes) -> Said:
    try:
        return _said(printed)
    except msgspec.MsgspecError:
        raise MapRefused("asking it failed") from None
