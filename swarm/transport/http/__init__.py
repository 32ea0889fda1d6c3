"""The piece plane: blobs named by their BLAKE3-256 hash, over HTTP/1.1.

    GET  /blob/<64 hex digits>   the bytes; HEAD likewise without them
    PUT  /blob/<64 hex digits>   push; `Expect: 100-continue` asks before sending
    GET  /challenge              32 random bytes, good once on this connection
    POST /admission              msgpack [peer id, signature, credential]

A client proves its identity once per connection: it signs `PROOF_DOMAIN ‖ server's peer id ‖
challenge`, so a proof is worthless on another connection or at another server. The `BulkService`
sees a client without a proof as `None`. The server checks every second whether a client is still
admitted, during long answers too, so an eviction or an expired lease cuts the client off within a
second.

Heads go through h11, each with a fresh parser. The exceptions are the one request and the one
answer that peers exchange thousands of times: one regular expression matches each. Bodies bypass
h11: they leave by sendfile and arrive by recv_into, straight into the sink, which hashes them.
Mirrors may also be `https://`; only clients speak it.

A peer without a usable HTTP address answers the same requests over a stream, `/swarm/blob/2.0.0`:
`Ask`, then `Answer` and DATA frames (get), or `Answer`, DATA frames from the client and a second
`Answer` (put).

Files: `wire` moves heads and bodies over one connection; `pace` bounds how long a body takes and
how fast this peer sends; `server` answers; `client` asks; `swarm.transport.libp2p.pieces` does both
over a stream.
"""
