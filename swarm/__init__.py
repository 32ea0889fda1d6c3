"""The network every Swarm peer is made of: identity, wire, DHT, gossip, shardcast, ledger.

Nothing in this package imports torch, and nothing imports `peers` (the roles) or `simnet`.
"""

__version__ = "0.1.0"

PROTOCOL_VERSION = 1
"""Version of the wire protocol. Peers drop envelopes of another version. For a run manifest of
another version, the error also names the version of this peer."""
