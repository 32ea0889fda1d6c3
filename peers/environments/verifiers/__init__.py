"""Environments of the `verifiers` package, played in a child process under their own Python.

`environment.py` is the environment that a run names; it asks the child by a pool of one process.
`child/` is the program of the child, the only part that imports `verifiers`; `installed.py` says
where its Python is, and makes it."""
