"""Measuring a checkpoint on tasks that no training draws, apart from any run.

For other rooms, by the names in docs/rooms.md: `command`, `during`, `run`, `settings`, `tasks`
"""
