"""Alarms: what may need a person, told to the log, to Prometheus and to a webhook.

`catalogue` has every alarm and the events that are its signs, `board` raises and clears them,
`ringing` feeds it a peer's own events, and `webhook` tells people.
"""
