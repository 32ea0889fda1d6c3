"""A generic js-libp2p kad-dht node beside Swarm peers, configured as the DHT's page says.

Needs Node.js and, in the `node_modules` folder that SWARM_JS_MODULES names, the packages which
docs/protocol/kademlia.md lists.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import trio

from swarm.kademlia.dht import Kademlia
from swarm.kademlia.providers import provider_key
from swarm.run.manifest import run_id
from swarm.run.records import peer_key, record_validators, run_key
from swarm.transport import Transport
from swarm.transport.libp2p import open_libp2p
from swarm.wire.envelope import open_envelope, seal
from swarm.wire.identity import Identity, PeerId
from swarm.wire.messages import PeerRecord
from swarm.world import Disk
from swarm.world.machine import Machine
from tests.commands.harness import bootstrap_peer, signed_manifest

PAGE = Path(__file__).parents[2] / "docs" / "protocol" / "kademlia.md"
PROGRAM = Path(__file__).with_name("javascript_node.mjs")
DEADLINE_SECONDS = 30.0
SHA256_KEY = b"\x12\x20" + bytes(range(32))
BLAKE3_KEY = provider_key(bytes(range(32)))


def the_page(fence: str) -> str:
    """The one block of that language on the DHT's page."""
    (block,) = re.findall(rf"```{fence}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return cast(str, block)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """The JavaScript program with the page's configuration and the packages beside it."""
    if shutil.which("node") is None:
        pytest.skip("Node.js is not installed: there is no `node`")
    version = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True)
    if int(version.stdout.strip().lstrip("v").split(".")[0]) < 22:
        pytest.skip(f"js-libp2p needs Node.js 22, and `node` is {version.stdout.strip()}")
    modules = os.environ.get("SWARM_JS_MODULES")
    if not modules:
        pytest.skip("SWARM_JS_MODULES does not name a node_modules folder with js-libp2p")
    wanted = re.sub(r"@\d+( |$)", r"\1", the_page("sh").strip()).split()[2:]
    missing = [name for name in wanted if not (Path(modules) / name / "package.json").exists()]
    if missing:
        pytest.skip(f"the folder SWARM_JS_MODULES names lacks {', '.join(missing)}")
    folder = tmp_path / "javascript"
    folder.mkdir()
    (folder / "node_modules").symlink_to(Path(modules).resolve())
    (folder / "swarm_dht.mjs").write_text(the_page("js"))
    return Path(shutil.copy(PROGRAM, folder))


class JavaScriptNode:
    def __init__(self, process: trio.Process) -> None:
        self._process = process
        self._received = b""

    async def ask(self, command: str, *parameters: str) -> Any:
        """What the program answers to one command."""
        assert self._process.stdin is not None and self._process.stdout is not None
        await self._process.stdin.send_all(json.dumps([command, *parameters]).encode() + b"\n")
        with trio.fail_after(DEADLINE_SECONDS):
            while b"\n" not in self._received:
                data = await self._process.stdout.receive_some()
                assert data, "the JavaScript program ended"
                self._received += data
        line, _, self._received = self._received.partition(b"\n")
        answer = json.loads(line)
        assert "error" not in answer, answer["error"]
        return answer["answer"]


@asynccontextmanager
async def javascript_node(program: Path, mode: str) -> AsyncIterator[JavaScriptNode]:
    process = await trio.lowlevel.open_process(
        ["node", str(program), mode], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        yield JavaScriptNode(process)
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


class SwarmPeer:
    def __init__(self, identity: Identity, transport: Transport) -> None:
        world = Machine()
        self.identity = identity
        self.addresses = list(transport.addresses())
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._heard = trio.Event()
        self.dht = Kademlia(transport, world, record_validators(world.wall_time), emit=self._emit)

    def _emit(self, name: str, /, **fields: object) -> None:
        self.events.append((name, fields))
        self._heard.set()
        self._heard = trio.Event()

    async def until_contact(self, other: PeerId) -> None:
        """Wait for another peer to enter this one's routing table."""
        with trio.fail_after(DEADLINE_SECONDS):
            while other not in self.dht.table:
                await self._heard.wait()

    @property
    def id(self) -> str:
        return self.identity.peer_id

    def record(self, sequence: int, age_seconds: float = 0) -> bytes:
        """This peer's record, signed; it lives for ten minutes."""
        message = PeerRecord(roles=["observer"], addresses=self.addresses)
        return seal(
            self.identity,
            message,
            run="",
            sequence=sequence,
            wall_time=time.time() - age_seconds,
            lifetime_seconds=600,
        ).raw

    def failures(self, other: str) -> list[str]:
        """What went wrong between this peer and another, in words."""
        return [
            f"{name}: {fields.get('reason')}"
            for name, fields in self.events
            if fields.get("other") == other
            and name.endswith(("_failed", "_refused", "_disbelieved", "_removed"))
        ]


@asynccontextmanager
async def swarm_peers(count: int, bootstrap: str) -> AsyncIterator[list[SwarmPeer]]:
    """Peers in this process, each joined through `bootstrap`."""
    peers: list[SwarmPeer] = []
    async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
        for number in range(count):
            identity = Identity(bytes([0x40 + number]) * 32)
            transport = await stack.enter_async_context(
                open_libp2p(
                    identity,
                    ["/ip4/127.0.0.1/tcp/0"],
                    world=Machine(),
                    disk=cast(Disk, None),  # nothing here touches the bulk plane
                )
            )
            peer = SwarmPeer(identity, transport)
            await nursery.start(peer.dht.run)
            with trio.fail_after(DEADLINE_SECONDS):
                await peer.dht.bootstrap([bootstrap])
            peers.append(peer)
        yield peers
        nursery.cancel_scope.cancel()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["client", "server"])
def test_a_javascript_node_takes_part(mode: str, program: Path, tmp_path: Path) -> None:
    owner = Identity(bytes([9]) * 32)
    manifest = signed_manifest(tmp_path / "tokenizer", owner)
    (tmp_path / "run.manifest").write_bytes(manifest.raw)
    manifest_name = run_key(run_id(manifest)).decode()

    async def main(bootstrap: str) -> None:
        bootstrap_id = bootstrap.rpartition("/")[2]
        async with (
            swarm_peers(2, bootstrap) as (first, second),
            javascript_node(program, mode) as node,
        ):
            node_id = PeerId(await node.ask("id"))
            assert await node.ask("join", bootstrap) >= 1

            # It finds peers that it has never met, and pings them.
            for peer in (first, second):
                found = await node.ask("find_peer", peer.id)
                assert {f"{address}/p2p/{peer.id}" for address in found} == set(peer.addresses)
            assert await node.ask("ping", second.id)

            # It reads what Swarm peers have signed.
            assert await node.ask("get", manifest_name) == manifest.raw.hex()
            record = open_envelope(
                bytes.fromhex(await node.ask("get", f"/swarm-peer/{bootstrap_id}"))
            )
            assert isinstance(record.message, PeerRecord)
            assert record.message.addresses == [bootstrap]

            # A server has become a contact like any other, and holds what Swarm peers store.
            holders = 3
            if mode == "server":
                holders += 1
                await first.until_contact(node_id)
                await second.until_contact(node_id)
                assert list(await first.dht.find_peer(node_id)) == await node.ask("addresses")
            name = peer_key(first.id)
            older, newer = first.record(sequence=1), first.record(sequence=2)
            for key, value in ((name, older), (manifest_name.encode(), manifest.raw)):
                assert await first.dht.put(key, value) == holders
                if mode == "server":
                    assert await node.ask("stored", key.decode()) == value.hex()
            assert await node.ask("get", name.decode()) == older.hex()

            # Its validators and its selector judge as Swarm's do.
            text, other = name.decode(), peer_key(second.id).decode()
            future, past = first.record(3, age_seconds=-90), first.record(3, age_seconds=601)
            for asked, value, verdict in (
                (text, newer, True),
                (manifest_name, manifest.raw, True),
                (other, newer, "under another key"),
                (manifest_name, newer, "of another kind"),
                (text, newer[:63] + bytes([newer[63] ^ 1]) + newer[64:], "bad signature"),
                (text, future, "issued in the future"),
                (text, past, "expired"),
            ):
                assert await node.ask("valid", asked, value.hex()) == verdict
            twin = first.record(sequence=2, age_seconds=1)
            values = [older, twin, newer]
            best = max(values, key=lambda value: (open_envelope(value).body.sequence, value))
            for order in (values, values[::-1]):
                chosen = await node.ask("best", text, *(value.hex() for value in order))
                assert order[chosen] == best

            # What it stores, Swarm peers believe.
            stored_at = await node.ask("put", name.decode(), newer.hex())
            assert set(stored_at) == {bootstrap_id, first.id, second.id}
            assert await second.dht.get(name) == newer

            # It provides, and finds those that provide.
            for multihash in (BLAKE3_KEY, SHA256_KEY):
                await second.dht.provide(multihash)
                found = await node.ask("find_providers", multihash.hex())
                assert [f"{address}/p2p/{second.id}" for address in found[second.id]] == (
                    second.addresses
                )
                await node.ask("provide", multihash.hex())
                providers = await first.dht.find_providers(multihash)
                assert {provider.peer for provider in providers} == {second.id, node_id}

            for peer in (first, second):
                if mode == "server":
                    assert peer.failures(node_id) == []
                    assert sum(fields.get("failed", 0) for _, fields in peer.events) == 0
                else:
                    assert node_id not in peer.dht.table

    with bootstrap_peer(tmp_path / "bootstrap", tmp_path / "run.manifest") as address:
        trio.run(main, address)
