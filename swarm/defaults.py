"""Every default number, with its unit in its name and its reason below it.

One section a room. Numbers that a run's owner chooses stand in the run manifest instead.
"""

from __future__ import annotations

# --- envelopes -------------------------------------------------------------------------------

# --- messenger -------------------------------------------------------------------------------

# --- membership ------------------------------------------------------------------------------

# --- kademlia --------------------------------------------------------------------------------

# --- shardcast -------------------------------------------------------------------------------

PIECES_WANTED = 2048
"""A checkpoint is cut into about this many pieces, so that many peers can be busy with it."""

PIECE_BYTES_MIN = 256 * 1024
"""Below this, request overhead outweighs the transfer."""

PIECE_BYTES_MAX = 32 * 1024 * 1024
"""What one wrong byte can cost, and what one sink may have to hold."""

CHECKPOINT_MANIFEST_BYTES_MAX = 8 * 1024 * 1024
"""65,536 pieces at about 45 bytes, and 4,096 file names."""

CHECKPOINT_PIECES_MAX = 65_536
"""2 TiB at the largest piece size; also bounds the bitmaps that neighbours exchange (8 KiB)."""

CHECKPOINT_FILES_MAX = 4096

CHECKPOINTS_KEPT = 5
"""Complete checkpoints a peer keeps (INTELLECT-2's relays: 5)."""

CHECKPOINT_SYNC_BYTES = 64 * 1024 * 1024
"""A received checkpoint at least this large is fsynced when complete and trusted at the next
start; a smaller one is not fsynced but hashed again at the next start, which is cheaper."""

DELTA_BLOCK_BYTES = 256 * 1024
"""Compared, packed and changed at a time: fits a core's cache, and divides every piece."""

DELTA_CHECKPOINT_BYTES_MIN = 4 * 1024 * 1024
"""A smaller checkpoint is published without a delta: its full pieces travel as fast."""

DELTA_SHARE_MAX = 0.5
"""Of the full bytes: a delta that would be larger is not published, nor a chain fetched."""

DELTA_CHAIN_MAX = 8
"""Deltas a manifest names: how old a policy may be from which a peer still catches up. Whoever is
further behind fetches in full, as every checkpoint can be, so no chain hangs on older ones."""

DELTA_STALL_SECONDS = 60.0
"""A delta of which nothing arrives for so long is given up, and the checkpoint fetched in full."""

DELTA_TIME_SHARE = 0.25
"""Of the time that a fetch has left: a chain of deltas that takes longer to arrive is given up, and
the full pieces have the rest."""

DELTA_BYTES_PER_CALL = 256 * 1024 * 1024
"""Bytes of pieces that a child makes from deltas in one call, so that they are served meanwhile."""

DELTA_CHILD_BYTES_MAX = 1 << 30
"""Address space of the child that encodes and applies deltas: python, numpy, buffers."""

MIRRORS_MAX = 8
"""Mirrors that a manifest may name."""

SOURCE_SMOOTHING = 0.3
"""Weight of the newest observation in the averages of success and bandwidth (INTELLECT-2)."""

SOURCE_HEALING = 0.01
"""Added to every source's success rate per observation, capped at 1 (INTELLECT-2)."""

SOURCE_BANDWIDTH_INITIAL = 12.5e6
"""Bytes a second expected of the first source ever met (100 Mb/s)."""

SOURCE_MEASURED_BYTES_MIN = 64 * 1024
"""The time of a smaller piece is latency and says nothing of bandwidth."""

MIRROR_PIECE_SECONDS = 1.0
"""A mirror is not asked again so long for a piece that it lacks or has wrong, doubling."""

MIRROR_PIECE_SECONDS_MAX = 30.0

MIRROR_PIECE_ATTEMPTS = 4
"""In vain, over seven seconds, after which a fetch from mirrors alone no longer waits for it."""

SOURCE_CORRUPT_SECONDS = 60.0
"""A source of wrong bytes is not asked for so long, doubling: transport errors do not do that."""

SOURCE_BACKOFF_SECONDS = 0.1
"""Pause after a source's first failure, doubling up to the next number."""

SOURCE_BACKOFF_SECONDS_MAX = 10.0

SOURCES_KNOWN_MAX = 4096
"""Sources whose averages are remembered."""

NOT_YET_SECONDS = 0.05
"""Pause after a source said that it may have a piece later, doubling up to the next number."""

NOT_YET_SECONDS_MAX = 1.0

BUSY_SECONDS = 1.0
"""Pause after a source said that it is busy, doubling up to the next number, each half to whole by
chance. Its line is full, so asking again soon would gain nothing."""

BUSY_SECONDS_MAX = 16.0

FETCH_PARALLEL = 8
"""Pieces one peer asks for at once to begin with: at 25 Mb/s each, the average uplink of a swarm
that shares evenly."""

FETCH_PARALLEL_MAX = 32
"""Pieces a peer asks for at once when its neighbours are far ahead."""

FETCH_FLOWING_SHARE = 0.8
"""More are asked for where a request spends more than the rest of its time on its way and back."""

FETCH_ENDING_SHARE = 1 / 32
"""While no more than this part of the pieces is missing, twice as many are asked for at once."""

FETCH_LATE = 1.2
"""Whoever lacks so many times the pieces that its neighbours lack (a tenth less than they said some
time ago) is late, and looks for more neighbours."""

FETCH_BUSY_SECONDS = 2.0
"""After a busy source a fetch tries no further lane for so long, doubling up to
`BUSY_SECONDS_MAX`; sooner while it has few."""

FETCH_PARALLEL_PER_SOURCE = 4
"""Pieces asked of one source at once: one arrives while the next request travels. Up to half of
`FETCH_PARALLEL_MAX` where there are few sources and requests are on their way most of the time."""

FETCH_RUN_SECONDS = 0.02
"""On a fast line as many pieces are asked for at once as arrive within this time (4 MB at 200 MB/s
and request): asking for each by itself takes about 0.3 ms of computing at both ends together. Below
50 MB/s a request of 512 KiB is for one piece, as ever."""

FETCH_RUN_PIECES_MAX = 16
"""What one request may ask for at once: 16 requests of HTTP fit in one packet of loopback, and
their descriptors are few."""

FETCH_LOOK_SECONDS_MIN = 0.01
"""A fetch with free lanes looks around no more often than this without being told of anything."""

FETCH_LEAVE_SHARE = 1 / 16
"""Part of the pieces after which another source is drawn though the last one has more: sources
are chosen again as conditions change."""

UPLOAD_SECONDS = 12.0
"""A peer sends at once what keeps its uplink busy for so long: 3 pieces of 32 MiB at 50 Mb/s, 45
at 1 Gb/s, so that each upload goes at about 20 Mb/s when all are in use, and there are a few more
than `FETCH_PARALLEL` for each peer of an average uplink of 200 Mb/s."""

UPLOAD_COUNTED_SECONDS = 4 * UPLOAD_SECONDS
"""An upload that takes longer no longer counts as one that keeps the uplink busy: three readers of
a byte now and then would else keep everybody else from an uplink of 50 Mb/s."""

UPLOAD_MEASURED_SECONDS_MIN = 1.0
"""The uplink is measured over no less."""

UPLOAD_SLOWER_SMOOTHING = 0.1
"""Weight of a measurement below the average: the uplink may just not have been asked for more."""

SEEDING_BYTES_MIN = 256 * 1024 * 1024
"""Each piece of a checkpoint at least this large leaves its publisher once before any leaves it
twice; a smaller one is everywhere before that matters."""

SEEDING_SECONDS = 10.0
"""When no piece has left for the first time for so long, the publisher sends any."""

SEEDING_END_SHARE = 1 / 64
"""When so few pieces have not left yet, the publisher sends any."""

SEEDING_SHOWN = 8
"""Pieces that a publisher shows to one neighbour ahead of what that one has fetched."""

FETCH_HEDGE_SECONDS = 0.5
"""One of the last pieces is asked of another source after twice its expected time, and no sooner
than this."""

PIECE_DEADLINE_SECONDS = 10.0
"""A piece's deadline without its transfer time."""

PIECE_BYTES_PER_SECOND_MIN = 2 * 64 * 1024
"""A source slower than this misses the deadline: so much before the source breaks off that who
fetches honestly gives up first."""

SOURCES_RECHECK_SECONDS = 1.0
"""How often a fetch with nothing to do asks its caller for new sources."""

CHECKPOINT_DEADLINE_SECONDS = 3600.0
"""The default for a whole fetch."""

HAVE_BATCH_SECONDS = 0.25
"""New pieces are announced to a neighbour at most this often."""

HAVE_PATIENCE = 0.25
"""News of a checkpoint waits for so large a part of the time since it began to arrive: a neighbour
always knows of most pieces, and a long broadcast costs few frames."""

HAVE_BATCH_SECONDS_MAX = 60.0
"""But never longer than this."""

HAVE_ENDING_SHARE = 1 / 128
"""While a neighbour lacks no more than this part of the pieces, news goes out at once."""

HAVE_NEIGHBOURS = 8
"""Neighbours that a peer looks for, to exchange with them what each has."""

HAVE_NEIGHBOURS_LATE = 16
"""The same for a peer that is late: most of its neighbours may be on slow lines."""

HAVE_NEIGHBOURS_MAX = 64
"""Neighbours that a peer announces to, those counted that chose it."""

HAVE_NEIGHBOUR_BYTES_PER_SECOND = 4e6
"""A neighbour is fed about so much: it receives 25 MB/s in a swarm with the average uplink of 200
Mb/s, and takes only what it lacks. So 31 neighbours for 1 Gb/s."""

HAVE_GROW_PIECES = 16
"""With fewer pieces of the newest checkpoint a peer has little to offer to more neighbours."""

HAVE_GROW_SECONDS = 3.0
"""A peer with fewer neighbours than its uplink can feed takes one more in so long."""

HAVE_SATED_SECONDS = 12.0
"""A peer with enough neighbours looks after so long whether they still want something."""

HAVE_FRUITLESS_MAX = 12
"""New neighbours in a row that want nothing; then a peer looks for no more until the next news."""

HAVE_INBOUND_MAX = 256
"""Peers whose announcements are listened to at once."""

HAVE_CHECKPOINTS_MAX = 16
"""Checkpoints remembered per neighbour; the oldest is forgotten."""

HAVE_DEADLINE_SECONDS = 10.0
"""A neighbour that does not take an announcement by then is no neighbour."""

HAVE_FRAME_SECONDS_MIN = 0.02
"""A neighbour's frames are read no faster than this on average; honest ones come every 250 ms."""

# --- transport: libp2p -----------------------------------------------------------------------

HAVE_SILENCE_SECONDS = 1.0
"""A neighbour that announces, but nothing of this checkpoint, is asked for it after so long."""
