"""A run: its signed manifest and versions, who takes part in it, and who is trusted.

The owner signs a *run manifest*; its id is `<owner peer id>/<name>`.
"""
