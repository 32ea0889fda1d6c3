"""Fetching: from an announcement to a complete folder, with pieces from several sources at once.

A fetch has a number of lanes. Each lane requests one piece after the other from one source: the
rarest piece that the source claims and no lane has requested; on a fast line, several consecutive
pieces. A lane stays with its source while the source has more pieces and is not slow, so that every
uplink keeps its readers. Else it changes to another source, sampled from the `SourceBook`. The
manifest is fetched like a piece. When every piece is requested and lanes are free, the slowest
pieces are requested from further sources too; the first right answer wins and the other requests
are cancelled. A committed piece is never fetched again, even after a restart.

- `fetcher`: the lanes of a fetch, from its first request to its end
- `job`: the state of a running fetch
- `choosing`: the choice of the next piece to request, and of its source
- `requesting`: one request to one source
"""
