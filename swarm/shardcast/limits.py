"""Limits of checkpoints and their sources that several files of this package share."""

PIECES_WANTED = 2048
"""A checkpoint is cut into about this many pieces, so that many peers can exchange them at once."""

PIECE_BYTES_MIN = 256 * 1024
"""Smallest piece size: below it, request overhead outweighs the transfer."""

SMALL_BYTES = 4 * PIECE_BYTES_MIN
"""A checkpoint of fewer bytes is cut into pieces of this size, so one per file: exchanging two or
three pieces saves no time, and each costs a request."""

PIECE_BYTES_MAX = 32 * 1024 * 1024
"""Largest piece size: bytes lost to one wrong byte, and bytes that one sink may have to hold."""

CHECKPOINT_MANIFEST_BYTES_MAX = 8 * 1024 * 1024
"""Room for 65,536 pieces of about 45 bytes each, and 4,096 file names."""

CHECKPOINT_PIECES_MAX = 65_536
"""2 TiB at the largest piece size; also bounds the bitmaps that neighbours exchange (8 KiB)."""

DELTA_CHAIN_MAX = 8
"""Deltas a manifest names: from how old a policy a peer still catches up by deltas. A peer with an
older policy fetches in full, as every checkpoint can be, so no chain depends on older ones."""

MIRRORS_MAX = 8
"""Mirrors that a manifest may name."""

CHECKPOINTS_KEPT = 5
"""Complete checkpoints a peer keeps (INTELLECT-2's relays: 5)."""

CHECKPOINT_DEADLINE_SECONDS = 3600.0
"""Default deadline of a whole fetch."""

SOURCE_SMOOTHING = 0.3
"""Weight of the newest observation in the averages of success and bandwidth (INTELLECT-2)."""

SOURCE_BANDWIDTH_INITIAL = 12.5e6
"""Bytes per second expected of a source before any was measured (100 Mb/s)."""

SOURCES_RECHECK_SECONDS = 1.0
"""Between two checks for new sources by a fetch with nothing to do."""
