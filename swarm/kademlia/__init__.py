"""A Kademlia DHT over the transport seam, in the wire format of libp2p's kad-dht.

Other packages need only `Kademlia`, and a `Validator` per record namespace.
"""

from swarm.kademlia.dht import Kademlia
from swarm.kademlia.providers import provider_key
from swarm.kademlia.publishing import PutResult
from swarm.kademlia.records import InvalidRecord, RecordInfo, StoreFull, Validator
from swarm.kademlia.wire import PROTOCOL, Neighbour, WireError

__all__ = [
    "PROTOCOL",
    "InvalidRecord",
    "Kademlia",
    "Neighbour",
    "PutResult",
    "RecordInfo",
    "StoreFull",
    "Validator",
    "WireError",
    "provider_key",
]
