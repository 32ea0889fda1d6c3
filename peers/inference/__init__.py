"""Inference peers: they generate rollouts, prove them, and hand them to validators.

For other rooms, by the names in docs/rooms.md: `delivery`, `outbox`, `pending`, `role`
"""
