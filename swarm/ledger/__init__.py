"""The append-only logs of the trusted peers, and what follows from them: credits and evictions."""
