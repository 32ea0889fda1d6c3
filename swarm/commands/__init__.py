"""The `swarm` command (`main.py`), and those of its commands that the network itself needs.

One file per command. The others lie with what they drive, in `peers`; entry points of the group
`swarm.commands` name them all.

For other rooms, by the names in docs/rooms.md: `ledger_checks`, `peer`, `rollouts`, `start`,
`status`
"""
