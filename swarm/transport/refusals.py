"""What the statuses of a refused fetch or push mean to the client, on every transport."""

from __future__ import annotations

from swarm.transport import FetchError

RETRY_STATUSES = (404, 429, 503)
"""Refusals that time may cure: the source lacks the piece so far, or has too much to do."""

LACKS_STATUSES = (403, 404, 410)
"""Of a web server: it has not that file, or gives it to nobody (buckets say 403 for both)."""

BUSY_STATUSES = (429, 503)
"""Refusals that say nothing against the source."""


def refusal(name: str, status: int, reason: str) -> FetchError:
    """The error for a source or target that refused with an HTTP status."""
    return FetchError(
        f"{name} refused: {status} {reason}",
        retry=status in RETRY_STATUSES,
        busy=status in BUSY_STATUSES,
        lacks=status in LACKS_STATUSES,
    )
