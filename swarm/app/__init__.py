"""What people type and look at: the `swarm` command, the demo, and the start of a peer.

This is the only room of `swarm` that may import the roles in `peers`; nothing below imports it.
"""
