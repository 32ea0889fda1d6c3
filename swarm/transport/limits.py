"""Limits of streams and connections that several transports share."""

FRAME_BYTES_MAX = 1 << 20
"""Largest frame received on a stream that this peer opened; a served protocol names its own."""

STREAM_WINDOW_BYTES = 256 * 1024
"""Bytes that a sender may have unread at the other side: one yamux window."""

STREAM_SEND_DEADLINE_SECONDS = 30.0
"""A reader that has not made room for a frame for this long is stuck; the stream is reset."""

STREAM_LINGER_SECONDS = 10.0
"""Wait for the other side's end after the handler of a served stream has returned."""

STREAM_OPEN_DEADLINE_SECONDS = 10.0
"""Opening a stream: negotiating its protocol takes one or two round trips."""

CONNECT_DEADLINE_SECONDS = 10.0
"""Connecting to a peer, all its addresses together: a dial, a handshake, at most one relay hop."""

DIAL_DEADLINE_SECONDS = 5.0
"""Connecting to one address: dial, noise and yamux take five round trips."""

DIAL_ADDRESSES_MAX = 8
"""Addresses of a peer tried in turn."""

CONNECTIONS_MAX = 4096
"""Live connections of one peer, 32 KiB each without streams. libp2p prunes from 300 on."""

CONNECTIONS_KEPT = 128
"""A peer with more connections closes idle ones. Each lookup in the DHT makes some twenty, so
without this bound everybody would in time be connected to everybody. About 100 are in use: 32 of
gossip, 64 of pieces, a few trusted peers."""

CONNECTIONS_SPARE_SHARE = 1 / 16
"""Share of its connections that a peer which keeps all it has room for (`Transport.keep_many`)
leaves to newcomers: it closes idle ones before it is full."""

CONNECTION_TRIM_SECONDS = 10.0
"""Between two looks for idle connections beyond those kept."""

CONNECTIONS_OF_STRANGERS_MAX = 1024
"""Of these, connections of peers that are neither trusted nor admitted."""

CONNECTION_GRACE_SECONDS = 20.0
"""A connection younger than this is not idle: its first stream may open soon."""

CONNECTION_PING_SECONDS = 15.0
"""Between two pings of a connection. libp2p's yamux pings too but ignores silence, so a peer that
lost power would stay connected."""

CONNECTION_PONG_SECONDS = 10.0
"""A connection on which a ping is not answered for this long is closed."""

RELAY_RESERVATIONS_MAX = 128
"""Peers behind NAT that one relay serves."""

RELAY_RETRY_SECONDS = 10.0
"""Between attempts to renew a lost reservation."""

STREAM_WRITE_SECONDS = 8.0
"""Writing one frame to a connection, or one message to a stream. Other implementations of yamux
give a stream up after 5 to 10 s."""

CLOSE_SECONDS = 2.0
"""Closing all connections when a peer ends, or resetting a stream."""
