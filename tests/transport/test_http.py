"""The bulk plane against clients and servers that lie, stall and flood; real sockets, no libp2p."""

from __future__ import annotations

import datetime
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
import trio.testing
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from swarm.transport import BlobReference, FetchError, Traffic
from swarm.transport.http import limits, server
from swarm.transport.http.client import BulkClient
from swarm.transport.http.messages import Proof, Unreachable, proof_message
from swarm.transport.http.pace import Uplink
from swarm.transport.http.server import BulkServer
from swarm.transport.http.serving import Serving
from swarm.wire.identity import Identity
from swarm.world import Disk, Piece
from swarm.world.disk import LocalDisk

from .harness import ALICE, BOB, CAROL, MALLORY, Service, Sink

pytestmark = pytest.mark.wall_clock

DATA = bytes(range(256)) * 8192  # 2 MiB


@asynccontextmanager
async def serving(
    service: Service | None, disk: Disk, *, host: str = "127.0.0.1", port: int = 0, **more: Any
) -> AsyncIterator[str]:
    """Bob's bulk server on loopback; its root. `more` is for `Serving`."""
    server = BulkServer(Serving(BOB.peer_id, disk, lambda: service, **more))
    listeners = await trio.open_tcp_listeners(port, host=host)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(server.serve, listeners)
        name = f"[{host}]" if ":" in host else host
        yield f"http://{name}:{listeners[0].socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def scripted(script: Callable) -> AsyncIterator[str]:
    """A server that runs `script(stream)` for each connection."""
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")

    async def handle(stream: trio.SocketStream) -> None:
        async with stream:
            try:
                await script(stream)
            except trio.BrokenResourceError:
                return  # the client has left: that is its right

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, handle, listeners)
        yield f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def client_of(
    disk: Disk, identity: Identity = ALICE, credential: bytes = b"lease"
) -> AsyncIterator[BulkClient]:
    client = BulkClient(identity, disk, lambda: credential, Traffic())
    try:
        yield client
    finally:
        client.close()


async def fetch(client: BulkClient, root: str, peer, reference: BlobReference, sink: Any) -> Piece:
    """Fetch one blob."""
    pieces: list[Piece] = []

    async def arrived(piece: Piece) -> None:
        pieces.append(piece)

    await client.fetch_run(root, peer, [(reference, sink)], arrived)
    return pieces[0]


async def dial(root: str, source: str | None = None) -> trio.SocketStream:
    """Connect, perhaps from another address of loopback."""
    host, port = root.removeprefix("http://").split(":")
    return await trio.open_tcp_stream(host, int(port), local_address=source)


async def ask(stream: trio.SocketStream, request: bytes) -> bytes:
    """Send, then read one answer: head and as much body as it announces."""
    await stream.send_all(request)
    received = b""
    while b"\r\n\r\n" not in received:
        data = await stream.receive_some()
        if not data:
            return received
        received += data
    head, _, body = received.partition(b"\r\n\r\n")
    length = 0
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    while len(body) < length:
        data = await stream.receive_some()
        if not data:
            break
        body += data
    return head + b"\r\n\r\n" + body


def admission(proof: Proof) -> bytes:
    body = msgspec.msgpack.encode(proof)
    return b"POST /admission HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body


CHALLENGE = b"GET /challenge HTTP/1.1\r\nhost: x\r\n\r\n"


async def challenge(stream: trio.SocketStream) -> bytes:
    return (await ask(stream, CHALLENGE)).partition(b"\r\n\r\n")[2]


# --- proofs ----------------------------------------------------------------------------------


async def test_a_proof_holds_for_one_peer_one_server_one_connection(disk) -> None:
    service = Service()
    async with serving(service, disk) as root:
        async with await dial(root) as first:
            nonce = await challenge(first)
            good = Proof(ALICE.peer_id, ALICE.sign(proof_message(BOB.peer_id, nonce)), b"c")
            assert b" 204 " in await ask(first, admission(good))
            assert service.asked == [(ALICE.peer_id, b"c")]
            # Good once: the challenge is gone.
            assert b" 403 " in await ask(first, admission(good))
        # Replayed on another connection.
        async with await dial(root) as second:
            await challenge(second)
            assert b"is for another peer" in await ask(second, admission(good))
        # Without asking for a challenge.
        async with await dial(root) as third:
            assert b"challenge first" in await ask(third, admission(good))
        # Somebody else's name over one's own signature.
        async with await dial(root) as fourth:
            nonce = await challenge(fourth)
            signature = MALLORY.sign(proof_message(BOB.peer_id, nonce))
            stolen = Proof(ALICE.peer_id, signature, b"c")
            assert b"is for another peer" in await ask(fourth, admission(stolen))
        # A proof that Carol's server was given, passed on to Bob.
        async with await dial(root) as fifth:
            nonce = await challenge(fifth)
            signature = ALICE.sign(proof_message(CAROL.peer_id, nonce))
            relayed = Proof(ALICE.peer_id, signature, b"c")
            assert b"is for another peer" in await ask(fifth, admission(relayed))
        assert len(service.asked) == 1


@pytest.mark.parametrize("first", [0, 16_000])
async def test_a_head_of_20_kb_is_refused_however_it_comes(disk, first: int) -> None:
    """Also when the last packet alone makes it too long, and complete."""
    head = b"GET /challenge HTTP/1.1\r\nhost: x\r\nx: %s\r\n\r\n" % (b"x" * 20_000)
    async with serving(Service(), disk) as root, await dial(root) as stream:
        await stream.send_all(head[:first])
        await trio.testing.wait_all_tasks_blocked(0.01)
        answer = await ask(stream, head[first:])
        assert answer.startswith(b"HTTP/1.1 400 ") and b"too long" in answer, answer[:80]


async def test_who_proves_nothing_is_nobody(disk) -> None:
    service = Service()
    reference = service.offer(disk, DATA)
    get = b"GET /blob/%s HTTP/1.1\r\nhost: x\r\n\r\n" % reference.digest.hex().encode()
    async with serving(service, disk) as root:
        async with await dial(root) as stream:
            assert (await ask(stream, get)).endswith(DATA)
            assert len(await challenge(stream)) == 32  # the connection goes on
        assert service.clients == [None]
        service.admitted = {ALICE.peer_id}
        async with await dial(root) as stream:
            assert b"403" in await ask(stream, get)
        assert service.clients == [None]
        async with client_of(disk) as client:
            sink = Sink(len(DATA))
            piece = await fetch(client, root, BOB.peer_id, reference, sink)
            assert piece.verify(reference.digest)
        assert service.clients == [None, ALICE.peer_id]


async def test_connections_are_kept_and_a_new_credential_opens_a_new_one(disk) -> None:
    service = Service()
    reference = service.offer(disk, DATA)
    credentials = [b"first"]
    async with serving(service, disk) as root:
        client = BulkClient(ALICE, disk, lambda: credentials[0], Traffic())
        for _ in range(3):
            await fetch(client, root, BOB.peer_id, reference, Sink(len(DATA)))
        credentials[0] = b"second"
        await fetch(client, root, BOB.peer_id, reference, Sink(len(DATA)))
        client.close()
    assert service.asked == [(ALICE.peer_id, b"first"), (ALICE.peer_id, b"second")]


async def test_a_refusal_costs_no_new_connection(disk, monkeypatch) -> None:
    """To be told "busy" or "not yet" is usual while a checkpoint spreads."""
    monkeypatch.setattr(limits, "ADMITTED_SECONDS", 3600.0)
    service = Service()
    reference = service.offer(disk, DATA)
    unknown = BlobReference(b"?" * 32, 5)

    async def fails(client: BulkClient, wanted: list[BlobReference]) -> None:
        async def arrived(piece) -> None:
            assert piece.verify(reference.digest)

        with pytest.raises(FetchError, match="404 no such blob here"):
            sinks = [(one, Sink(one.size_bytes)) for one in wanted]
            await client.fetch_run(root, BOB.peer_id, sinks, arrived)

    async with serving(service, disk) as root, client_of(disk) as client:
        for _ in range(5):
            await fails(client, [unknown])
        await fails(client, [reference, unknown])
        await fetch(client, root, BOB.peer_id, reference, Sink(len(DATA)))
        assert len(service.asked) == 1, "all on one connection"
        await fails(client, [unknown, reference])  # an answer is still on its way
        sink = Sink(len(DATA))
        await fetch(client, root, BOB.peer_id, reference, sink)
        assert sink.data == DATA
        assert len(service.asked) == 2
        service.quota = 5
        with pytest.raises(FetchError, match="413 over the quota"):
            await client.push(root, BOB.peer_id, reference, "blob")
        await fetch(client, root, BOB.peer_id, reference, Sink(len(DATA)))
        assert len(service.asked) == 3, "after a push that was refused the server closes"


async def test_a_server_that_restarted_is_found_again(disk) -> None:
    """The kept connection is dead; the next fetch must not fail for that."""
    service = Service()
    reference = service.offer(disk, DATA)
    async with client_of(disk) as client:
        port = 0
        for _ in range(2):
            async with serving(service, disk, port=port) as root:
                port = int(root.rpartition(":")[2])
                await fetch(client, root, BOB.peer_id, reference, Sink(len(DATA)))


# --- hostile clients -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"rubbish\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(50), b"400"),
        (b"GET /" + b"a" * 20_000, b"400"),
        (b"GET /challenge HTTP/1.1\r\nhost: x\r\n" + b"x: y\r\n" * 5000, b"400"),
        (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", b"404"),
        (b"GET /blob/../../etc/passwd HTTP/1.1\r\nhost: x\r\n\r\n", b"404"),
        (b"GET /blob/" + b"AB" * 32 + b" HTTP/1.1\r\nhost: x\r\n\r\n", b"404"),
        (b"DELETE /blob/" + b"ab" * 32 + b" HTTP/1.1\r\nhost: x\r\n\r\n", b"405"),
        (
            b"PUT /blob/" + b"ab" * 32 + b" HTTP/1.1\r\nhost: x\r\n"
            b"transfer-encoding: chunked\r\n\r\n",
            b"411",
        ),
        (
            b"PUT /blob/" + b"ab" * 32 + b" HTTP/1.1\r\nhost: x\r\n"
            b"content-length: 99999999999\r\n\r\n",
            b"413",
        ),
        (b"POST /admission HTTP/1.1\r\nhost: x\r\ncontent-length: 9999999\r\n\r\n", b"413"),
        (b"POST /admission HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nabcd", b"403"),
    ],
)
async def test_bad_requests_get_a_status(disk, request_bytes: bytes, status: bytes) -> None:
    async with serving(Service(), disk) as root, await dial(root) as stream:
        answer = await ask(stream, request_bytes)
        assert answer.startswith(b"HTTP/1.1 " + status)


async def test_slow_and_idle_clients_are_closed(disk, monkeypatch) -> None:
    monkeypatch.setattr(limits, "IDLE_SECONDS", 0.3)
    monkeypatch.setattr(limits, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(limits, "STALL_SECONDS", 0.3)
    service = Service()
    reference = service.offer(disk, bytes(32 << 20))
    get = b"GET /blob/%s HTTP/1.1\r\nhost: x\r\n\r\n" % reference.digest.hex().encode()
    put = b"PUT /blob/%s HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n" % (b"ab" * 32)
    async with serving(service, disk) as root:
        for first in (b"", b"GET /chall", put + b"12"):
            async with await dial(root) as stream:
                if first:
                    await stream.send_all(first)
                assert await stream.receive_some() == b""
        assert service.sinks[-1].abandoned
        # One who asks for 32 MiB and reads nothing: the blob is released all the same.
        async with await dial(root) as stream:
            released = trio.Event()
            service.blobs[reference.digest].release = released.set
            await stream.send_all(get)
            with trio.fail_after(10):
                await released.wait()


async def test_a_trickle_is_too_slow_on_the_whole(disk, monkeypatch) -> None:
    monkeypatch.setattr(limits, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(limits, "BYTES_PER_SECOND_MIN", 1 << 20)
    service = Service()
    put = b"PUT /blob/%s HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n" % (b"ab" * 32)
    async with serving(service, disk) as root, await dial(root) as stream:
        await stream.send_all(put)
        began = trio.current_time()
        with pytest.raises(trio.BrokenResourceError):
            while True:
                await stream.send_all(b"x")
                await trio.sleep(0.05)
        assert trio.current_time() - began < 2


async def test_connections_are_bounded_per_address(disk, monkeypatch) -> None:
    monkeypatch.setattr(server, "CONNECTIONS_PER_ADDRESS_MAX", 2)
    async with serving(Service(), disk) as root:
        async with await dial(root) as first, await dial(root) as second:
            await challenge(first)
            await challenge(second)
            async with await dial(root) as third:
                assert b"503" in await third.receive_some()
        async with await dial(root) as again:
            assert len(await challenge(again)) == 32


# --- protection --------------------------------------------------------------------------------


def get(reference: BlobReference) -> bytes:
    return b"GET /blob/%s HTTP/1.1\r\nhost: x\r\n\r\n" % reference.digest.hex().encode()


async def prove(stream: trio.SocketStream, identity: Identity = ALICE) -> bytes:
    signature = identity.sign(proof_message(BOB.peer_id, await challenge(stream)))
    return await ask(stream, admission(Proof(identity.peer_id, signature, b"lease")))


@pytest.mark.parametrize("pushes", [False, True])
async def test_who_is_evicted_is_cut_off_in_the_middle(disk, monkeypatch, pushes: bool) -> None:
    """Also on a connection that proved itself, also within a blob."""
    monkeypatch.setattr(limits, "ADMITTED_SECONDS", 0.05)
    service = Service()
    service.admitted = {ALICE.peer_id}
    reference = service.offer(disk, bytes(64 << 20))
    put = b"PUT /blob/%s HTTP/1.1\r\nhost: x\r\ncontent-length: 9999999\r\n\r\n" % (b"ab" * 32)
    # On a line on which the blob takes seven seconds: loopback carries it in less than an
    # interval between two looks.
    slow = Uplink(10e6)
    async with serving(service, disk, uplink=slow) as root, await dial(root) as stream:
        assert b" 204 " in await prove(stream)
        if pushes:
            await stream.send_all(put + b"some")
        else:
            await stream.send_all(get(reference))
            await stream.receive_some()
        service.admitted = set()
        with trio.fail_after(5):
            with pytest.raises((trio.BrokenResourceError, AssertionError)):
                while True:
                    if pushes:
                        await stream.send_all(bytes(1000))
                        await trio.sleep(0.02)
                    else:
                        assert await stream.receive_some(), "closed"
        if not pushes:
            assert service.released == 1


async def test_a_lease_that_ran_out_is_refused_on_an_open_connection(disk, monkeypatch) -> None:
    monkeypatch.setattr(limits, "ADMITTED_SECONDS", 0.0)
    service = Service()
    service.admitted = {ALICE.peer_id}
    reference = service.offer(disk, DATA)
    async with serving(service, disk) as root, await dial(root) as stream:
        await prove(stream)
        assert (await ask(stream, get(reference))).endswith(DATA)
        service.admitted = set()
        assert b"no longer admitted" in await ask(stream, get(reference))
        assert await stream.receive_some() == b""


async def test_connections_are_bounded_per_peer(disk, monkeypatch) -> None:
    monkeypatch.setattr(server, "CONNECTIONS_PER_PEER_MAX", 2)
    service = Service()
    service.admitted = {ALICE.peer_id, CAROL.peer_id}
    async with serving(service, disk) as root:
        async with await dial(root) as first, await dial(root) as second:
            assert b" 204 " in await prove(first)
            assert b" 204 " in await prove(second)
            assert b" 204 " in await prove(second)  # again is no further connection
            async with await dial(root) as third:
                assert b"too many connections of this peer" in await prove(third)
            async with await dial(root) as fourth:
                assert b" 204 " in await prove(fourth, CAROL)
        await trio.testing.wait_all_tasks_blocked(0.01)
        async with await dial(root) as again:
            assert b" 204 " in await prove(again)


async def test_a_flood_of_small_requests_waits_and_blobs_do_not(disk, monkeypatch) -> None:
    monkeypatch.setattr(server, "SMALL_REQUESTS_PER_SECOND", 1e-6)
    monkeypatch.setattr(server, "SMALL_REQUESTS_BURST", 4.0)
    service = Service()
    reference = service.offer(disk, DATA)
    unknown = BlobReference(b"?" * 32, 1)
    async with serving(service, disk) as root, await dial(root) as stream:
        for _ in range(5):
            assert b"404" in await ask(stream, get(unknown))
        await stream.send_all(get(unknown))
        async with await dial(root) as other:
            for _ in range(20):
                assert (await ask(other, get(reference))).endswith(DATA[-10:])
        with trio.move_on_after(0.01) as waiting:
            await stream.receive_some()
        assert waiting.cancelled_caught


async def test_a_limited_uplink_is_shared_and_kept(disk) -> None:
    service = Service()
    reference = service.offer(disk, DATA)
    ended: list[float] = []

    async def fetch_one(client: BulkClient) -> None:
        await fetch(client, root, None, reference, Sink(len(DATA)))
        ended.append(trio.current_time() - began)

    async with serving(service, disk, uplink=Uplink(10e6)) as root, client_of(disk) as client:
        began = trio.current_time()
        async with trio.open_nursery() as fetches:
            for _ in range(2):
                fetches.start_soon(fetch_one, client)
    seconds = 2 * len(DATA) / 10e6
    assert seconds - 0.15 < max(ended) < seconds * 3  # 0.1 s at most is made up for
    assert min(ended) > 0.6 * max(ended), "both took turns"


async def test_small_documents_are_for_everybody(disk) -> None:
    service = Service()
    service.admitted = set()
    pages = {b"/checkpoint.json": b"{}"}
    async with serving(service, disk, pages=pages) as root, client_of(disk) as client:
        assert await client.document(root, "/checkpoint.json", 100) == b"{}"
        with pytest.raises(FetchError, match="404 no such path"):
            await client.document(root, "/other.json", 100)
        with pytest.raises(FetchError, match="2 bytes, more than 1"):
            await client.document(root, "/checkpoint.json", 1)


# --- mirrors over TLS --------------------------------------------------------------------------


def certificate(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """A server's context with a certificate for localhost, and a client's that trusts it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = made.public_bytes(serialization.Encoding.PEM)
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "both.pem").write_bytes(private + pem)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "both.pem")
    return server, ssl.create_default_context(cadata=pem.decode())


async def test_an_https_mirror_is_used_and_its_certificate_checked(disk, tmp_path) -> None:
    body = DATA[:100_000]
    there, here = certificate(tmp_path)

    async def static(stream: trio.SSLStream) -> None:
        try:
            while data := await stream.receive_some():
                assert data.startswith(b"GET /bucket/blob/")
                await stream.send_all(
                    b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nETag: x\r\n\r\n" % len(body) + body
                )
        except trio.BrokenResourceError:
            return  # a client that does not trust us hangs up

    listeners = await trio.open_ssl_over_tcp_listeners(
        0, there, host="127.0.0.1", https_compatible=True
    )
    port = listeners[0].transport_listener.socket.getsockname()[1]  # type: ignore[attr-defined]
    root = f"https://localhost:{port}/bucket"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, static, listeners)
        client = BulkClient(ALICE, disk, lambda: b"", Traffic())
        client.tls = here
        for _ in range(2):
            sink = Sink(len(body))
            await fetch(client, root, None, BlobReference(bytes(32), len(body)), sink)
            assert sink.data == body
        client.close()
        stranger = BulkClient(ALICE, disk, lambda: b"", Traffic())
        with pytest.raises(Unreachable, match="certificate"):
            await fetch(stranger, root, None, BlobReference(bytes(32), 1), Sink(1))
        stranger.close()
        nursery.cancel_scope.cancel()


async def test_requests_that_come_at_once_are_answered_in_turn(disk) -> None:
    service = Service()
    parts = [DATA, b"small", DATA[:5000]]
    wanted = [get(service.offer(disk, part, path=str(n))) for n, part in enumerate(parts)]
    async with serving(service, disk) as root:
        stream = await dial(root)
        async with stream:
            # All of them, cut in the middle of the last.
            sent = b"".join(wanted)
            await stream.send_all(sent[:-30])
            await stream.send_all(sent[-30:])
            received = bytearray()
            while not received.endswith(DATA[:5000]) or len(received) < sum(map(len, parts)):
                received += await stream.receive_some()
            for part in parts:
                head, _, rest = bytes(received).partition(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 ")
                assert rest[: len(part)] == part
                received = bytearray(rest[len(part) :])
            assert not received


@pytest.mark.parametrize("peer", [BOB.peer_id, None])
async def test_a_peer_is_asked_for_a_run_at_once_and_a_mirror_in_turn(disk, peer) -> None:
    """The server answers only when it has read as many requests as it expects."""
    expected = 1 if peer is None else 3
    most = 0

    async def script(stream: trio.SocketStream) -> None:
        nonlocal most
        received = b""
        while data := await stream.receive_some():
            received += data
            if b"/challenge" in received:
                received = b""
                await stream.send_all(b"HTTP/1.1 404 \r\ncontent-length: 0\r\n\r\n")
                continue
            count = received.count(b"GET /blob/")
            most = max(most, count)
            if count == expected and received.endswith(b"\r\n\r\n"):
                received = b""
                await stream.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nblob" * count)

    sizes = []

    async def arrived(piece) -> None:
        sizes.append(piece.size_bytes)

    async with scripted(script) as root, client_of(disk) as client:
        wanted = [(BlobReference(bytes([n]) * 32, 4), Sink(4)) for n in range(3)]
        await client.fetch_run(root, peer, wanted, arrived)
        assert [bytes(sink.data) for _, sink in wanted] == [b"blob"] * 3
    assert sizes == [4, 4, 4]
    assert most == expected


# --- hostile servers -------------------------------------------------------------------------


def answer(head: str, body: bytes = b"") -> Callable:
    """A server that answers every request so, whatever it is, and then holds the line."""

    async def script(stream: trio.SocketStream) -> None:
        while await stream.receive_some():
            await stream.send_all(f"HTTP/1.1 {head}\r\n\r\n".encode() + body)

    return script


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (answer("200 OK\r\ncontent-length: 11"), "11 bytes of a blob of 10"),
        (answer("200 OK"), "how many bytes"),
        (answer("200 OK\r\ncontent-length: 10", b"12345"), "stalled or was too slow: 5 bytes"),
        (answer("404 Not Found\r\ncontent-length: 4", b"gone"), "404 gone"),
        (answer("500 Oops\r\ncontent-length: 99999999999"), "stalled"),
        (answer("301 Moved\r\nlocation: http://x/\r\ncontent-length: 0"), "301"),
        (answer("rubbish"), "no HTTP"),
        (answer("200 OK\r\n" + "x: y\r\n" * 20_000), "no HTTP"),
    ],
)
async def test_bad_answers_are_fetch_errors(disk, monkeypatch, script, reason: str) -> None:
    monkeypatch.setattr(limits, "STALL_SECONDS", 0.3)
    async with scripted(script) as root, client_of(disk) as client:
        with pytest.raises(FetchError, match=reason) as caught:
            await fetch(client, root, None, BlobReference(bytes(32), 10), Sink(10))
        assert root in str(caught.value)


@pytest.mark.parametrize(
    ("script", "kept"),
    [
        (answer("503 Busy\r\ncontent-length: 4", b"busy"), True),
        (answer("404 Not Found\r\ncontent-length: 0"), True),
        (answer("503 Busy\r\ncontent-length: 4\r\nconnection: close", b"busy"), False),
        (answer("404 Not Found\r\ncontent-length: 300", b"x" * 300), False),
        (answer("404 Not Found", b"gone"), False),
        (answer("103 Early Hints"), False),
        (answer("404 Not Found\r\ncontent-length: 4", b"gone and more"), False),
        (answer("404 Not Found\r\ntransfer-encoding: chunked", b"1\r\nx\r\n0\r\n\r\n"), False),
    ],
)
async def test_a_connection_is_kept_after_a_refusal_that_was_read_whole(
    disk, script, kept: bool
) -> None:
    connections = 0

    async def counted(stream: trio.SocketStream) -> None:
        nonlocal connections
        connections += 1
        await script(stream)

    async with scripted(counted) as root, client_of(disk) as client:
        for _ in range(3):
            with pytest.raises(FetchError, match="refused"):
                await fetch(client, root, None, BlobReference(bytes(32), 10), Sink(10))
        assert connections == (1 if kept else 3)


async def test_a_server_that_says_nothing_or_hangs_up(disk, monkeypatch) -> None:
    monkeypatch.setattr(limits, "STALL_SECONDS", 0.3)
    reference = BlobReference(bytes(32), 10)

    async def silent(stream: trio.SocketStream) -> None:
        await trio.sleep_forever()

    async def hang_up(stream: trio.SocketStream) -> None:
        await stream.receive_some()

    async with client_of(disk) as client:
        for script in (silent, hang_up):
            async with scripted(script) as root:
                with pytest.raises(FetchError):
                    await fetch(client, root, None, reference, Sink(10))
                with pytest.raises(Unreachable):  # another way to the peer may work
                    await fetch(client, root, BOB.peer_id, reference, Sink(10))
                disk.put("ten", b"0123456789")
                with pytest.raises(FetchError):
                    await client.push(root, None, reference, "ten")


async def test_a_plain_web_server_is_a_mirror(disk) -> None:
    """No challenge there: the peer's name alone must not keep us from its blobs."""
    body = b"0123456789"

    async def static(stream: trio.SocketStream) -> None:
        while data := await stream.receive_some():
            if b"GET /cdn/blob/" in data:
                await stream.send_all(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n" + body)
            else:
                await stream.send_all(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno")

    async with scripted(static) as root, client_of(disk) as client:
        for peer in (None, BOB.peer_id):
            sink = Sink(10)
            await fetch(client, f"{root}/cdn", peer, BlobReference(bytes(32), 10), sink)
            assert sink.data == body


async def test_no_socket_is_left_when_a_fetch_is_cancelled(disk) -> None:
    async def silent(stream: trio.SocketStream) -> None:
        await trio.sleep_forever()

    async with scripted(silent) as root, client_of(disk) as client:
        with trio.move_on_after(0.1) as scope:
            await fetch(client, root, None, BlobReference(bytes(32), 10), Sink(10))
        assert scope.cancelled_caught
        assert not client._idle


async def test_ipv6_roots(disk) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    service = Service()
    reference = service.offer(disk, DATA)
    try:
        async with serving(service, disk, host="::1") as root, client_of(disk) as client:
            await fetch(client, root, BOB.peer_id, reference, Sink(len(DATA)))
    except OSError:
        pytest.skip("no IPv6 loopback here")


async def _whole(disk: LocalDisk, path: str) -> BlobReference:
    size = disk.size_bytes(path)
    return BlobReference(await disk.digest(path, 0, size), size)
