"""Assembly of a node from the parts of the seam."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import trio

from swarm.events import Events
from swarm.kademlia.dht import Kademlia
from swarm.kademlia.records import Validator
from swarm.node.node import Node, create_tables
from swarm.run.records import record_validators
from swarm.settings import PeerSettings
from swarm.transport import Transport
from swarm.wire.envelope import Envelope, Sequencer
from swarm.wire.identity import Identity
from swarm.world import Compute, Disk, World


@asynccontextmanager
async def assemble(
    identity: Identity,
    *,
    world: World,
    disk: Disk,
    compute: Compute,
    transport: Transport,
    events: Events,
    settings: PeerSettings,
    manifests: Mapping[str, Envelope],
    namespaces: Mapping[str, Validator] | None = None,
) -> AsyncIterator[Node]:
    """Make a node from the parts of the seam; it serves its DHT and its manifests in the block.

    `namespaces`: further ones that its DHT keeps records of, with their validators."""
    database = disk.database("peer.sqlite")
    await create_tables(database)
    validators = {**record_validators(world.wall_time), **(namespaces or {})}
    dht = Kademlia(transport, world, validators, emit=events.emit)
    async with trio.open_nursery() as nursery:
        await nursery.start(dht.run)
        node = Node(
            identity=identity,
            world=world,
            disk=disk,
            compute=compute,
            transport=transport,
            dht=dht,
            events=events,
            settings=settings,
            database=database,
            sequencer=Sequencer(database, world.wall_time),
            manifests=dict(manifests),
        )
        node.serve_manifests()
        events.emit(
            "peer.listening",
            roles=settings.role,
            addresses=list(transport.addresses()),
            bulk=list(transport.bulk_addresses()),
        )
        try:
            yield node
        finally:
            nursery.cancel_scope.cancel()
            database.close()
