"""A run: its signed manifest and its versions, its members, its trusted peers.

The owner signs a *run manifest*. The run's id is `<owner peer id>/<name>`.
"""
