"""Copies of the logs: a lost disk among sleeping peers, hostile copies, a damaged database."""

from __future__ import annotations

import re
import shutil
import sqlite3
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import trio

from swarm.errors import PeerError, leaf_errors
from swarm.ledger.entries import CheckpointPublished, Entry, encode
from swarm.ledger.log import Log
from swarm.ledger.mirror import LogMirror
from swarm.wire.identity import Identity
from tests.ledger.harness import ALICE, BOB, OWNER, TRAINER, Peer, Swarm, sealed, verdict_at

HOURS = 3600.0


def an_old_swarm(folder: Path, age_seconds: float = 48 * HOURS) -> Swarm:
    swarm = Swarm(folder)
    swarm.manifest = sealed(
        OWNER, swarm.manifest.message, swarm.run, at=-age_seconds, lifetime_seconds=1e6
    )
    return swarm


def size(peer: Peer, owner: str) -> int:
    return LogMirror(peer.trusted._database, owner).log.size()


def holds(peer: Peer, owner: Identity, entries: int) -> bool:
    return size(peer, owner.peer_id) == entries


async def test_a_lost_log_is_not_begun_anew_while_everybody_else_sleeps(tmp_path: Path) -> None:
    swarm = an_old_swarm(tmp_path)
    async with swarm.peer(TRAINER), swarm.peer(BOB) as bob, swarm.peer(ALICE) as alice:
        for number in range(3):
            await alice.trusted.append_verdict(verdict_at(number))
        await bob.until(lambda: size(bob, ALICE.peer_id) == 3, "bob has a copy")
    shutil.rmtree(tmp_path / ALICE.peer_id)
    async with swarm.peer(ALICE) as alice, trio.open_nursery() as nursery:
        nursery.start_soon(alice.trusted.append_verdict, verdict_at(3))
        await trio.sleep(60)
        (told,) = alice.events("ledger.waits_for_copies")
        assert told["remotes"] == [TRAINER.peer_id, BOB.peer_id]
        assert size(alice, ALICE.peer_id) == 0, "it writes nothing"
        async with swarm.peer(BOB) as bob:
            await alice.until(lambda: size(alice, ALICE.peer_id) == 4, "restored, and goes on")
            await bob.until(lambda: size(bob, ALICE.peer_id) == 4, "bob follows")
            assert not bob.events("ledger.forked")


async def test_who_waits_in_vain_is_told_what_to_type(tmp_path: Path) -> None:
    async def alone(swarm: Swarm, seconds: float) -> Peer:
        async with swarm.peer(ALICE) as alice:
            await trio.sleep(seconds)
        return alice

    swarm = an_old_swarm(tmp_path)
    with pytest.raises(BaseExceptionGroup) as caught:
        await alone(swarm, 700)
    (error,) = leaf_errors(caught.value)
    assert isinstance(error, PeerError)
    assert re.search(f"no log of this peer, and .*{BOB.peer_id} did not say", str(error))
    assert "--new-log" in str(error)
    swarm.settings = {"new_log": True}
    assert not (await alone(swarm, 20)).events("ledger.waits_for_copies")
    swarm.settings = {}  # from now on the home says that the log exists, though it is empty
    assert not (await alone(swarm, 20)).events("ledger.waits_for_copies")


async def test_a_new_run_and_one_in_which_the_others_answer_begin_at_once(tmp_path: Path) -> None:
    new = an_old_swarm(tmp_path / "new", 0.5 * HOURS)
    async with new.peer(ALICE) as alice:
        await alice.trusted.append_verdict(verdict_at(0))
        assert trio.current_time() < 5
    old = an_old_swarm(tmp_path / "old")
    async with old.peer(TRAINER), old.peer(ALICE), old.peer(BOB) as bob:
        began = trio.current_time()
        await bob.trusted.append_verdict(verdict_at(0))
        assert trio.current_time() < began + 5


class Cut(Log):
    """A pruned log whose server leaves out hashes of its origin."""

    def peaks(self) -> Sequence[bytes]:  # type: ignore[override]
        return super().peaks()[1:]


async def test_a_copy_that_cannot_be_stored_ends_no_peer(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    async with swarm.peer(BOB) as bob:
        for number in range(5):
            await bob.trusted.append_verdict(verdict_at(number))
        log = Cut(bob.trusted._database, BOB.peer_id)
        await bob.trusted._database.transact(lambda c: log.prune_within(c, 3))
        bob.trusted.log_of = lambda owner: log  # type: ignore[method-assign]
        async with swarm.peer(ALICE) as alice:
            complaint = "hashes for a log that begins at 3"

            def refused() -> bool:
                told = alice.events("ledger.mirror_failed")
                return any(complaint in each["reason"] for each in told)

            await alice.until(refused, "it is refused")
            await alice.trusted.append_verdict(verdict_at(0))


def published(step: int) -> CheckpointPublished:
    return CheckpointPublished(lineage=0, step=step, manifest=bytes(32))


@pytest.mark.parametrize("start", [3, 4, 8], ids=["known", "at the end", "beyond"])
async def test_an_owner_that_calls_its_log_pruned_cannot_put_another_one_in_its_place(
    tmp_path: Path, start: int
) -> None:
    """It rewrites all that it has signed, and says that it begins where nobody can compare."""
    swarm = Swarm(tmp_path)
    async with swarm.peer(TRAINER) as trainer, swarm.peer(ALICE) as alice:
        async with swarm.peer(BOB) as bob:
            for number in range(4):
                await bob.trusted.append_verdict(verdict_at(number))
            for peer in (trainer, alice):
                await peer.until(partial(holds, peer, BOB, 4), "copied")
            log = Log(bob.trusted._database, BOB.peer_id)
            other: list[Entry] = [published(number) for number in range(13)]

            def rewrite(connection: sqlite3.Connection) -> None:
                log.begin_within(connection, 0, [])
                log.append_within(connection, [encode(entry) for entry in other[:12]])
                log.prune_within(connection, start)

            await bob.trusted._database.transact(rewrite)
            await bob.trusted.append(other[12:])
            await trio.sleep(30)
        for peer in (trainer, alice):
            assert peer.events("ledger.forked") or peer.events("ledger.mirror_failed")
            copy = LogMirror(peer.trusted._database, BOB.peer_id).log
            assert (copy.start(), copy.size()) == (0, 4)


class Altered(Log):
    """A copy of a log whose server sends other entries than were signed."""

    def entries(self, start: int, count: int) -> list[bytes]:
        return [encode(published(start + n)) for n in range(len(super().entries(start, count)))]


class Misplaced(Log):
    """A copy of a log whose server says that it is pruned, and sends no hashes for that part."""

    def start(self, connection: sqlite3.Connection | None = None) -> int:
        return 3

    def peaks(self) -> list[bytes]:
        return []


async def lose_log(
    swarm: Swarm, peers: Sequence[Peer], write: Callable[[Peer], Awaitable[None]], served: type[Log]
) -> Peer:
    """Let alice write, the others copy it, and alice lose it; returns the one of them that will be
    asked first, which serves its copy by this class."""
    async with swarm.peer(ALICE) as alice:
        await write(alice)
        for peer in peers:
            await peer.until(partial(holds, peer, ALICE, size(alice, ALICE.peer_id)), "copied")
    shutil.rmtree(swarm.folder / ALICE.peer_id)
    first = min(peers, key=lambda peer: peer.node.peer_id)
    copy = served(first.trusted._database, ALICE.peer_id)
    first.trusted.log_of = lambda owner: copy  # type: ignore[method-assign]
    return first


@pytest.mark.parametrize("lie", [Altered, Misplaced])
async def test_a_peer_that_sends_false_entries_does_not_keep_another_from_its_log(
    tmp_path: Path, lie: type[Log]
) -> None:
    async def write(alice: Peer) -> None:
        for number in range(4):
            await alice.trusted.append_verdict(verdict_at(number))

    swarm = an_old_swarm(tmp_path)
    async with swarm.peer(TRAINER) as trainer, swarm.peer(BOB) as bob:
        liar = await lose_log(swarm, [trainer, bob], write, lie)
        async with swarm.peer(ALICE) as alice:
            await alice.until(lambda: bool(alice.events("ledger.restored")), "it is restored")
            (told,) = alice.events("ledger.restore_failed")
            assert told["remote"] == liar.node.peer_id
            await alice.trusted.append_verdict(verdict_at(4))
            honest = bob if liar is trainer else trainer
            await honest.until(lambda: size(honest, ALICE.peer_id) == 5, "and goes on")
            assert not honest.events("ledger.forked")


class Dripping(Log):
    """A copy of a log whose server sends one entry at a time."""

    def entries(self, start: int, count: int) -> list[bytes]:
        return super().entries(start, min(count, 1))


@pytest.mark.slow
async def test_a_peer_that_hands_over_a_log_slowly_is_given_up_for_another(tmp_path: Path) -> None:
    count = 3000

    async def write(alice: Peer) -> None:
        await alice.trusted.append([published(number) for number in range(count)])

    swarm = an_old_swarm(tmp_path)
    async with swarm.peer(TRAINER) as trainer, swarm.peer(BOB) as bob:
        slow = await lose_log(swarm, [trainer, bob], write, Dripping)
        async with swarm.peer(ALICE) as alice:
            await alice.until(lambda: bool(alice.events("ledger.restored")), "it is restored")
            (told,) = alice.events("ledger.restore_failed")
            assert told["remote"] == slow.node.peer_id and "within 35 s" in told["reason"]
            assert size(alice, ALICE.peer_id) == count
