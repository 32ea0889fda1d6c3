"""`swarm demo`: a whole swarm on this machine, as separate processes on loopback.

`play` prepares the run and its peers (`cast`), and watches their processes; `state` collects their
events; `view` and `plain` show it.

For other rooms, by the names in docs/rooms.md: `recipes`, `setup`, `warmup`
"""
