"""Limits that several files of the piece plane share."""

STALL_SECONDS = 10.0
"""A transfer that moves no byte for this long is broken off."""

BYTES_PER_SECOND_MIN = 64 * 1024
"""A body that is slower on average is broken off, so that holding a connection has a price."""

READ_BYTES = 1 << 20
"""Bytes read from a socket or file at once: large enough that system calls cost nothing, small
enough that a hundred transfers fit in memory."""

CONNECT_SECONDS = 5.0
"""Connecting to a source and proving this peer's identity, at all its addresses together: half of a
piece's deadline, so that a stream can be tried after them."""

HEAD_SECONDS = 10.0
"""From the first byte of a request or answer to the end of its head."""

HEAD_BYTES_MAX = 16 * 1024
"""Request line and headers; also the most read of a small answer."""

IDLE_SECONDS = 60.0
"""The server closes a connection after this long without a request; clients do so sooner."""

STRANGER_SECONDS = 5.0
"""A client that has proved no identity sends each request's whole head within this time after it
connected or got its last answer; else the connection is closed."""

GRACE_SECONDS = 1.0
"""A connection without a request for so long is idle, and makes way for others: a client's next
request may be on its way until then."""

ADMITTED_SECONDS = 1.0
"""Between two checks that the client of a running transfer is still admitted."""

BLOB_BYTES_MAX = 1 << 30
"""Largest blob pushed or served: pieces have at most 32 MiB, rollout files stay far below this."""
