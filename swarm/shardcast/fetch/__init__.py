"""Fetching: from an announcement to a complete folder, with pieces from several sources at once.

A fetch has a number of lanes, each of which requests one piece after the other from one source
(docs/shardcast.md says which, and why). The manifest is fetched like a piece. A committed piece is
never fetched again, even after a restart.

- `fetcher`: the lanes of a fetch, from its first request to its end
- `job`: the state of a running fetch
- `choosing`: the choice of the next piece to request, and of its source
- `requesting`: one request to one source
"""
