"""A peer in the network, the same peer inside a run, and its part as a trusted peer.

For other rooms, by the names in docs/rooms.md: `assemble`, `joining`, `local`, `log_copies`,
`named`, `node`, `run_node`, `trusted`
"""
