"""What a ledger server and its client do with peers that lie, flood or fall silent."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
import trio

from swarm.errors import DeadlineError, PeerError
from swarm.ledger import wire
from swarm.ledger.archive import Archive
from swarm.ledger.client import LedgerClient, open_ledger
from swarm.ledger.entries import Evicted
from swarm.ledger.serving import (
    ANSWER_BYTES_MAX,
    READS_BURST,
    READS_PER_SECOND,
    STRANGERS_READS_BURST,
    STRANGERS_READS_PER_SECOND,
)
from swarm.ledger.wire import PROTOCOL, REQUEST_SECONDS
from swarm.look.archives import _copy_log
from swarm.node.node import Node
from swarm.node.trusted import STATUS_SECONDS
from swarm.transport import Stream
from swarm.wire.identity import Identity
from swarm.wire.messages import LogHead
from tests.ledger.harness import (
    ALICE,
    BOB,
    WORKER,
    Swarm,
    fetch,
    identity,
    receipts,
    sealed,
    verdict_at,
)

ROOT = bytes(32)


async def say(swarm: Swarm, reply: Callable[[bytes], Awaitable[bytes]], ask: str) -> None:
    """Have the worker ask `ask` of a server (Carol) that answers with `reply`."""
    carol = identity(50)

    async def serve(stream: Stream) -> None:
        while (raw := await stream.receive()) is not None:
            await stream.send(await reply(raw))

    async with swarm.peer(ALICE), swarm.peer(carol) as server, swarm.peer(WORKER) as worker:
        server.node.transport.serve(PROTOCOL, serve)
        if ask == "fetch":
            await fetch(worker.node, carol.peer_id)
        else:
            await receipts(worker.node, carol.peer_id, WORKER.peer_id)


def answers(*replies: object) -> Callable[[bytes], Awaitable[bytes]]:
    left = [
        reply if isinstance(reply, bytes) else msgspec.msgpack.encode(reply) for reply in replies
    ]

    async def reply(_raw: bytes) -> bytes:
        return left.pop(0) if len(left) > 1 else left[0]

    return reply


def head(size: int, key: Identity | None = None) -> wire.Head:
    return wire.Head(sealed(key or identity(50), LogHead(size=size, root=ROOT), "r").raw)


@pytest.mark.parametrize(
    ("replies", "complaint"),
    [
        ((b"\xc1",), "malformed"),
        ((wire.Proof([]),), "unexpected kind"),
        ((wire.Refusal("no"),), "refused a ledger request: no"),
        ((wire.Head(b""),), "keeps no ledger"),
        ((wire.Head(b"x" * 100),), "invalid log head"),
        ((head(3, BOB),), "something else than the head"),
        ((head(3), wire.Entries([])), "sent 0 log entries"),
        ((head(1), wire.Entries([b"a", b"b"])), "sent 2 log entries"),
    ],
)
async def test_a_client_believes_no_liar(tmp_path: Path, replies: tuple, complaint: str) -> None:
    with pytest.raises(PeerError, match=complaint):
        await unwrapped(say(Swarm(tmp_path), answers(*replies), "fetch"))


async def test_a_log_without_end_is_not_copied(tmp_path: Path) -> None:
    archive = Archive(Swarm(tmp_path).manifest)
    endless = sealed(BOB, LogHead(size=2**40, root=ROOT), "r")
    with pytest.raises(PeerError, match="too many to copy"):
        await _copy_log(LedgerClient(None), archive, endless)  # type: ignore[arg-type]


async def test_a_client_does_not_wait_for_ever(tmp_path: Path) -> None:
    async def reply(_raw: bytes) -> bytes:
        await trio.sleep_forever()
        return b""

    with pytest.raises(DeadlineError, match="within 10 s"):
        await unwrapped(say(Swarm(tmp_path), reply, "fetch"))


async def test_receipts_that_never_advance_end(tmp_path: Path) -> None:
    item = wire.LoggedVerdict(0, b"", head(1).envelope)
    with pytest.raises(PeerError, match="bad receipt for entry 0"):
        bad = answers(head(2), wire.Verdicts([item]), wire.Proofs([[]]))
        await unwrapped(say(Swarm(tmp_path), bad, "r"))
    late = wire.LoggedVerdict(5, b"", b"")
    await unwrapped(say(Swarm(tmp_path / "2"), answers(head(2), wire.Verdicts([late])), "r"))


async def unwrapped(coroutine: Awaitable[None]) -> None:
    """The single error inside the nurseries' groups."""
    try:
        await coroutine
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            (error,) = error.exceptions
        raise error from None


async def test_a_receipt_that_was_tampered_with_proves_nothing(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    async with swarm.peer(ALICE) as alice, swarm.peer(BOB) as bob:
        for number in range(3):
            await alice.trusted.append_verdict(verdict_at(number))
            await bob.trusted.append_verdict(verdict_at(number))
        good, other, _ = await receipts(alice.node, ALICE.peer_id, WORKER.peer_id)
        theirs = (await receipts(alice.node, BOB.peer_id, WORKER.peer_id))[0]
    assert good.problem() is None
    assert "different peers" in (dataclasses.replace(good, head=theirs.head).problem() or "")
    assert "differs from the verdict" in (
        dataclasses.replace(good, entry=other.entry).problem() or ""
    )
    assert "malformed" in (dataclasses.replace(good, entry=b"\x00").problem() or "")
    assert "names log index" in (dataclasses.replace(good, index=other.index).problem() or "")
    assert "proof" in (dataclasses.replace(good, proof=other.proof).problem() or "")
    swapped = dataclasses.replace(good, head=good.envelope)
    assert "not a verdict with a log head" in (swapped.problem() or "")


async def test_the_status_is_made_once_a_second_however_many_ask(tmp_path: Path) -> None:
    async with Swarm(tmp_path).peer(ALICE) as alice:
        first = alice.trusted.status()
        assert all(alice.trusted.status() is first for _ in range(100))
        await trio.sleep(STATUS_SECONDS + 0.1)
        assert alice.trusted.status() is not first


async def test_a_server_bounds_its_answers_and_refuses_what_makes_no_sense(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    async with swarm.peer(ALICE) as alice, swarm.peer(WORKER) as worker:
        await alice.trusted.append(
            [Evicted(peer=BOB.peer_id, reason="", envelope=bytes(60_000)) for _ in range(30)]
        )
        async with open_ledger(worker.node.transport, ALICE.peer_id) as client:
            assert len(await client.entries(ALICE.peer_id, 0, 2)) == 2
            many = await client.entries(ALICE.peer_id, 0, 1_000_000)
            assert 1 < len(many) < 30
            assert sum(map(len, many)) <= ANSWER_BYTES_MAX
            assert await client.head("nobody") is None
            for ask, complaint in (
                (lambda: client.entries("nobody", 0, 1), "no log of nobody"),
                (lambda: client.entries(ALICE.peer_id, 10**6, 1), "sent 0"),
                (lambda: client.inclusions(ALICE.peer_id, [0], 10**6), "entries, not"),
                (lambda: client.inclusions(ALICE.peer_id, [9], 3), "no leaf 9"),
                (lambda: client.consistency(ALICE.peer_id, 9, 3), "does not extend"),
            ):
                with pytest.raises(PeerError, match=complaint):
                    await ask()
        stream = await worker.node.transport.open_stream(ALICE.peer_id, PROTOCOL)
        for nonsense in (b"\x00", msgspec.msgpack.encode(["entries", "x", 0, 10**9])):
            await stream.send(nonsense)
            reply = msgspec.msgpack.decode(await stream.receive())  # type: ignore[arg-type]
            assert reply[0] == "refused"
        # A client that falls silent is let go.
        with trio.fail_after(2 * REQUEST_SECONDS):
            assert await stream.receive() is None
        await stream.reset()


async def test_strangers_read_within_a_rate_and_trusted_peers_without(tmp_path: Path) -> None:
    """64 proofs take 30 ms, in which a trusted peer does nothing else."""
    seconds = 4.0
    swarm = Swarm(tmp_path)
    async with swarm.peer(ALICE) as alice, swarm.peer(BOB) as bob:
        for number in range(64):
            await alice.trusted.append_verdict(verdict_at(number))

        async def read(node: Node, seconds: float = seconds) -> int:
            """Proofs that a peer obtains over several streams."""
            got = 0

            async def ask() -> None:
                nonlocal got
                async with open_ledger(node.transport, ALICE.peer_id) as client:
                    while True:
                        try:
                            proofs = await client.inclusions(ALICE.peer_id, range(64), 64)
                            got += len(proofs)
                        except PeerError as error:
                            assert "too many" in str(error)
                            await trio.sleep(0.5)

            await node.reach(ALICE.peer_id)
            with trio.move_on_after(seconds):
                async with trio.open_nursery() as nursery:
                    for _ in range(4):
                        nursery.start_soon(ask)
            return got

        got = await read(bob.node, 1.0)
        assert got > 2 * (READS_BURST + READS_PER_SECOND)
        found: list[int] = []

        async def stranger(number: int, done: trio.MemorySendChannel[None]) -> None:
            async with done, swarm.apart(identity(60 + number)) as peer:
                found.append(await read(peer.node))

        async with trio.open_nursery() as nursery:
            send, receive = trio.open_memory_channel[None](0)
            async with send:
                for number in range(4):
                    nursery.start_soon(stranger, number, send.clone())
            async for _ in receive:
                pass
        assert max(found) <= READS_BURST + seconds * READS_PER_SECOND + 4 * 64
        most = STRANGERS_READS_BURST + (seconds + 2) * STRANGERS_READS_PER_SECOND
        assert 0.7 * most < sum(found) <= most
        async with swarm.apart(identity(59)) as honest:
            await trio.sleep(60)
            assert len(await receipts(honest.node, ALICE.peer_id, WORKER.peer_id)) == 64
