"""A run: its signed manifest and its versions, and its members.

The owner signs a *run manifest*. The run's id is `<owner peer id>/<name>`.
"""
