"""The environment `terminal`: a shell whose state lasts over turns, and tests out of its reach.

`problem` says what a task is, runs its commands and grades what they leave; `environment` plays it.

For other rooms: `problem`: Check, Problem
"""
