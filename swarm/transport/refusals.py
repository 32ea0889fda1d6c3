"""Meaning of the HTTP statuses of refused fetches and pushes, on every transport."""

from __future__ import annotations

from swarm.transport import FetchError

RETRY_STATUSES = (404, 429, 503)
"""Refusals that may end with time: the source lacks the piece so far, or is overloaded."""

LACKS_STATUSES = (403, 404, 410)
"""A web server does not have the file, or serves it to nobody (buckets answer 403 for both)."""

BUSY_STATUSES = (429, 503)
"""Refusals that say nothing against the source."""


def refusal(name: str, status: int, reason: str) -> FetchError:
    """The error for a refusal by a source or target, from its HTTP status and reason."""
    return FetchError(
        f"{name} refused: {status} {reason}",
        retry=status in RETRY_STATUSES,
        busy=status in BUSY_STATUSES,
        lacks=status in LACKS_STATUSES,
    )
