"""Every default number, with its unit in its name and its reason below it.

One section a room. Numbers that a run's owner chooses stand in the run manifest instead.
"""

from __future__ import annotations

# --- envelopes -------------------------------------------------------------------------------

ENVELOPE_BYTES_MAX = 64 * 1024
"""Whole signed envelope. A checkpoint manifest is a blob, so nothing on the wire needs more."""

ENVELOPE_FUTURE_SECONDS_MAX = 60.0
"""An envelope issued further ahead than this is dropped: clocks differ, but not by a minute."""

ENVELOPE_LIFETIME_SECONDS = 120.0
"""Default time to live of an event; also how long its hash is remembered against replay."""

SEEN_ENVELOPES_MAX = 100_000
"""Remembered hashes (about 10 MB); a sender's rate limit keeps honest runs far below."""

SENDER_RATE_PER_SECOND = 50.0
"""Envelopes a second accepted from one sender, averaged."""

SENDER_RATE_BURST = 400.0
"""Envelopes a sender may send at once: a validator's verdicts come in bursts."""

CLOCK_SKEW_SECONDS_MAX = 30.0
"""Off the trusted peers' median by more than this, a peer says so and corrects its stamps."""
