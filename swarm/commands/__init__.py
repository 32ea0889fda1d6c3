"""The `swarm` command (`main.py`), and those of its commands that the network itself needs.

One file per command. The others lie with what they drive, in `peers`; entry points of the group
`swarm.commands` name them all.

For other rooms: `ledger_checks`: readable, report; `peer`: main; `rollouts`: chosen; `start`:
become_rank
"""
