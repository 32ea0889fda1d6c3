"""Alarms: what may need a person, told to the log and to Prometheus.

`raising.toml` has every alarm and the events that are its signs; the board in `raising` raises
and clears them, fed with a peer's own events.
"""
