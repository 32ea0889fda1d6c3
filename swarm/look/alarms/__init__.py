"""Alarms: what may need a person, told to the log and to Prometheus.

`catalogue` has every alarm and the events that are its signs, `board` raises and clears them, and
`ringing` feeds it a peer's own events.
"""
