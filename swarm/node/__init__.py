"""A peer in the network, the same peer inside a run, and its part as a trusted peer.

For other rooms: `assemble`: assemble; `joining`: EntryPoints, NO_WAY_IN, ROOM_DEADLINE_SECONDS,
find_run, join_dht, join_network; `local`: *, LOOPBACK, last_bootstrap, open_node, visit,
visit_network; `log_copies`: RETRY_SECONDS; `named`: NamedRoles; `node`: Departure, Node,
PEER_RECORD_LIFETIME_SECONDS; `run_node`: RunNode; `trusted`: EVICTION_LIFETIME_SECONDS,
TrustedPart, UNGRADED, UNGRADED_MAX, VERDICT_LIFETIME_SECONDS
"""
