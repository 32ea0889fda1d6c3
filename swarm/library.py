"""The library: a node or a run's visitor in a few lines, over what the commands use.

These are the asynchronous functions, for programs under trio; `swarm` has plain ones of the same
names (`swarm.plain`). docs/library.md shows both."""

import time
import warnings
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import trio

from swarm.errors import PeerError, UserError
from swarm.kademlia.records import NAMESPACE, SignedValues, data_of, sign_value
from swarm.ledger.archive import Archive
from swarm.look.archives import fetch_archive
from swarm.look.newest_policy import from_peers
from swarm.look.onlooker import RunStatus
from swarm.look.onlooker import status_of as ask_status
from swarm.look.rollouts.filters import Filters, Range
from swarm.node import local
from swarm.node.joining import join_dht, join_network
from swarm.node.node import Node
from swarm.run.run import Run
from swarm.settings import PeerSettings
from swarm.shardcast.manifest import CheckpointManifest
from swarm.shardcast.mirror import fetch as mirrors
from swarm.shardcast.mirror.publish import serve
from swarm.terminal.extras import require_extra
from swarm.world.tasks import open_guarded

FETCH_SECONDS = 3600.0


@dataclass(frozen=True)
class Visit:
    """A run seen from a node that has found it and does not join it."""

    node: Node
    run: Run


@asynccontextmanager
async def open_node(
    bootstrap: str | Sequence[str] = (),
    *,
    home: str | Path | None = None,
    listen: Sequence[str] = local.LOOPBACK,
) -> AsyncIterator[Node]:
    """Open a node of a network of your own, for values and messages; it joins no run.

    bootstrap: multiaddrs of nodes to connect to (`Node.addresses`); none for the first node.
    home: folder of the node's key, a temporary one by default. listen: multiaddrs to listen on,
    by default one that only this machine reaches. Raises `UserError`, and `PeerError` if no
    bootstrap node answers."""
    with TemporaryDirectory(prefix="swarm-node-") as momentary:
        settings = PeerSettings(
            role=["observer"],
            bootstrap=_listed(bootstrap),
            listen=list(listen),
            home=str(home or momentary),
        )
        namespaces = {NAMESPACE: SignedValues(time.time)}
        async with local.open_node(settings, _silent, namespaces) as node:
            if settings.bootstrap:
                await join_dht(node, await join_network(node))
            yield node


@asynccontextmanager
async def visit(
    bootstrap: str | Sequence[str] = (), run: str | None = None
) -> AsyncIterator[Visit]:
    """Visit a run without joining it, for `status_of` and `ledger_of`.

    bootstrap: multiaddrs of peers of its network; by default those that a peer of this user last
    joined through. run: its name or id, where the network has several. Raises `UserError`, and
    `PeerError` if no peer answers."""
    async with local.visit(_listed(bootstrap), run, looks_on=True) as (node, found):
        yield Visit(node, found)


async def status_of(visit: Visit) -> RunStatus:
    """Ask a run's trusted peers for its progress and peers; `PeerError` if none answers."""
    return await ask_status(visit.node, visit.run)


async def ledger_of(visit: Visit) -> Archive:
    """Copy the logs of a run's trusted peers; `Archive.problems` names silent peers."""
    return await fetch_archive(visit.node, visit.run)


async def put(node: Node, name: str, data: bytes) -> str:
    """Put a value into the DHT, signed by the node; returns its key, for `get`.

    A later one of the same name replaces it. It is kept for a day, up to 16 KiB, by nodes of
    `open_node`. Raises `UserError` for a bad name or too much data, and `PeerError` if no other
    node keeps it."""
    key, record = sign_value(node.identity, name, data, node.world.wall_time())
    raw = key.encode()
    for pause in (0.0, 1.0, 3.0):  # a neighbour may be late, as at its own start
        await trio.sleep(pause)
        others = await node.dht.put(raw, record) - (node.dht.records.get(raw) is not None)
        if others or not len(node.dht.table):
            return key
    raise PeerError(
        f"no peer of this network keeps the value {name!r}: the peers of a run keep manifests "
        "and addresses only; connect this node to others that open_node opened"
    )


async def get(node: Node, key: str) -> bytes | None:
    """The value that `put` gave this key, checked against its signer's key; None if none is found.

    Raises `UserError` for text that is no such key."""
    if not key.startswith(f"/{NAMESPACE}/"):
        raise UserError(f"the key {key[:80]!r} is none that put returned (/{NAMESPACE}/…)")
    record = await node.dht.get(key.encode())
    return None if record is None else data_of(record)


@asynccontextmanager
async def publish(
    folder: str | Path, *, host: str = "127.0.0.1", port: int = 0
) -> AsyncIterator[str]:
    """Serve a checkpoint's folder to anyone, piece by piece, and yield the address for `fetch`.

    host: address to listen on, by default one that only this machine reaches. port: 0 takes a free
    one. Nothing is copied. Raises `UserError`."""
    async with open_guarded() as guarded:
        bound = await guarded.nursery.start(partial(serve, Path(folder), host=host, port=port))
        yield f"http://[{host}]:{bound}" if ":" in host else f"http://{host}:{bound}"
        guarded.nursery.cancel_scope.cancel()


async def fetch(
    source: str | Sequence[str],
    out: str | Path,
    *,
    run: str | None = None,
    deadline_seconds: float = FETCH_SECONDS,
) -> CheckpointManifest:
    """Fetch a checkpoint into the new folder `out`, every piece checked; returns its manifest.

    source: the address of a mirror (`publish`), or multiaddrs of a run's peers for the newest
    policy; run: which run, where they have several. The same call resumes an interrupted fetch.
    Raises `UserError` and `PeerError`."""
    addresses = _listed(source)
    if not addresses or not all(
        each.startswith(("http://", "https://", "/")) for each in addresses
    ):
        raise UserError(
            f"the source is {source!r}; give the address of a mirror (http://…) or multiaddrs of "
            "peers (/ip4/…)"
        )
    if addresses[0].startswith("/"):
        held = await from_peers(Path(out), addresses, run=run, deadline=deadline_seconds)
    else:
        held = await mirrors.fetch(Path(out), mirrors=addresses, deadline_seconds=deadline_seconds)
    return held.manifest


def read_rollouts(
    source: str | Path,
    *,
    ledger: str | Path | None = None,
    tokenizer: str | Path | None = None,
    environment: str | None = None,
    reward: Range | None = None,
    worker: str | None = None,
    step: Range | None = None,
) -> Any:
    """The rollouts of a submission, a folder of them or a peer's home, as a `pyarrow.Table`.

    A row is a rollout; `swarm rollouts export` describes the columns in its README. ledger: a home
    or an export with the verdicts, if `source` has none. tokenizer: a folder with tokenizer.json,
    for texts. The others filter; ranges are inclusive. Warns of files that cannot be read. Raises
    `UserError`."""
    require_extra("infer", "swarm.read_rollouts")
    import pyarrow

    from swarm.look.rollouts.export import ROLLOUTS
    from swarm.look.rollouts.seen import as_row
    from swarm.look.rollouts.sources import open_source

    opened = open_source(
        Path(source),
        None if ledger is None else Path(ledger),
        None if tokenizer is None else Path(tokenizer),
    )
    found = opened.rollouts(Filters(environment, reward, worker, step))
    table = pyarrow.Table.from_pylist([as_row(each) for each in found], schema=ROLLOUTS.schema)
    for problem in opened.problems:
        warnings.warn(problem, stacklevel=2)
    return table


def _listed(addresses: str | Sequence[str]) -> list[str]:
    return [addresses] if isinstance(addresses, str) else list(addresses)


def _silent(event: Any) -> None:
    """Show no event."""
