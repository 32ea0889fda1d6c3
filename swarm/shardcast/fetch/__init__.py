"""From an announcement to a complete folder: pieces from several sources at once.

A fetch has a number of lanes. Each lane asks one source for one piece after the other: the rarest
that the source claims and that no lane has asked for; on a fast line, several consecutive ones. A
lane stays with its source while that has more pieces and is not slow, so that every uplink keeps
its readers; else it takes another one, sampled from the book. The manifest is fetched like a piece.
When every piece is asked for and lanes are free, the slowest ones are asked of further sources
too; the first right answer wins and the others are cancelled. A committed piece is never fetched
again, even after a restart.

- `fetcher`: the lanes of a fetch, from its first request to its end
- `job`: the state of a running fetch
- `choosing`: which piece to ask for next, and of which source
- `requesting`: one request to one source
"""
