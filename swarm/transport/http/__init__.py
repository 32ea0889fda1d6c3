"""The piece plane: blobs named by their BLAKE3-256 hash, over HTTP/1.1.

docs/protocol.md has its requests, and the proof by which a client may make them. The `BulkService`
sees a client without a proof as `None`.

Heads go through h11, each with a fresh parser. The exceptions are the one request and the one
answer that peers exchange thousands of times: one regular expression matches each. Bodies bypass
h11: they leave by sendfile and arrive by recv_into, straight into the sink, which hashes them.
Mirrors may also be `https://`; only clients speak it.

Files: `wire` moves heads and bodies over one connection; `pace` bounds how long a body takes and
how fast this peer sends; `server` answers; `client` asks; `swarm.transport.libp2p.pieces` does both
over a stream.
"""
