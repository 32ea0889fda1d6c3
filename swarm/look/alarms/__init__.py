"""Alarms: what may need a person, told to the log, the page, a webhook and a command.

`catalogue` has every alarm, `board` raises and clears them, `from_events` reads a peer's own
events, `from_run` what anyone can see of a run, and `delivery` tells people.
"""
