"""A whole swarm on this machine, as separate processes on loopback: what `swarm demo` runs.

`recipe` says what is trained and `cast` by whom, `play` puts it together, `processes` keeps the
processes alive, `state` folds their events into what is known, `view` and `plain` show that,
`summary` says at the end what it came to, and `command` runs it all.
"""
