"""`swarm dashboard`: a run as a local web page, from signed messages and logs only."""
