"""Merging checkpoints of one architecture into one: `swarm checkpoint merge`.

For other rooms, by the names in docs/rooms.md: `merge`
"""
