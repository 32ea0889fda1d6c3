"""Merging checkpoints of one architecture into one: `swarm checkpoint merge`.

For other rooms: `merge`: Method, Recipe, merge
"""
