"""`swarm dataset`: the tasks of a data set that a policy solves sometimes, and its attempts.

For other rooms, by the names in docs/rooms.md: `similar`
"""
