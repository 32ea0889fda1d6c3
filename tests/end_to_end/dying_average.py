"""Trainers of hivemind that die by SIGKILL inside an averaging, and one that asks by itself.

Services of children under hivemind's environment. The library names its requests by the class of
the averager, so each of these has the name of the real one.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from typing import Any, AsyncIterator  # noqa: UP035 - the library reads these hints

import trio
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import averaging_pb2

from peers.outer.backends.hivemind_network import key_file
from peers.outer.backends.hivemind_service import HivemindService, _Averager
from swarm.jobs.averaging import AveragingSetup
from swarm.wire.identity import Identity


def _die() -> None:
    os.killpg(0, signal.SIGKILL)


async def _die_before(self: Any, *group: Any, **named: Any) -> None:
    _die()


async def _die_after(self: Any, *group: Any, **named: Any) -> None:
    await _Averager._run_allreduce_inplace_(self, *group, **named)
    _die()


async def rpc_aggregate_part(
    self: Any, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
) -> AsyncIterator[averaging_pb2.AveragingData]:
    """Give one member all of this trainer's part of the average, and die once it has voted for the
    average, before another member has got anything."""
    favoured = self.__dict__.setdefault("favoured", context.remote_id)
    held = []
    async for part in _Averager.rpc_aggregate_part(self, stream, context):
        if context.remote_id == favoured:
            yield part
        else:
            held.append(part)
    while held:
        found = await self.dht.get(f"{self.prefix}.votes_1", latest=True, return_future=True)
        vote = found and found.value.get(favoured.to_bytes())
        if vote and vote.value > 0:
            _die()


class Before(HivemindService):
    averager = type("_Averager", (_Averager,), {"_run_allreduce_inplace_": _die_before})


class Within(HivemindService):
    averager = type("_Averager", (_Averager,), {"rpc_aggregate_part": rpc_aggregate_part})


class After(HivemindService):
    averager = type("_Averager", (_Averager,), {"_run_allreduce_inplace_": _die_after})


class Asking:
    """Asks a trainer, by the library's own client, for its state, and to join its group."""

    def __init__(self, setup: AveragingSetup) -> None:
        self._setup = setup

    async def open(self) -> list[str]:
        """The kinds of messages that it got."""
        return await trio.to_thread.run_sync(asyncio.run, self._ask())

    async def _ask(self) -> list[str]:
        with key_file(Identity(self._setup.seed)) as path:
            p2p = await P2P.create(
                initial_peers=self._setup.join, identity_path=path, check_if_identity_free=False
            )
        trainer = PeerID.from_base58(self._setup.join[0].rpartition("/")[2])
        stub = _Averager.get_stub(p2p, trainer, namespace=f"swarm_{self._setup.run}")
        got = []
        for ask, request in (
            (stub.rpc_download_state, averaging_pb2.DownloadRequest()),
            (stub.rpc_join_group, averaging_pb2.JoinRequest(group_key="a.0b0")),
        ):
            with suppress(ConnectionError):  # the trainer has hung up
                got += [type(answer).__name__ async for answer in await ask(request)]
        await p2p.shutdown()
        return got

    async def end(self) -> None:
        """Nothing is left."""
