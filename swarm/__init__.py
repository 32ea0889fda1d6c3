"""The network every Swarm peer is made of: identity, wire, DHT, gossip, shardcast, ledger.

Nothing in this package imports torch, and nothing imports `peers` (the roles) or `simnet`.
"""

__version__ = "0.1.0"
