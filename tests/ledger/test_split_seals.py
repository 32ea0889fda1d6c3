"""Trusted peers that sealed one epoch in two ways agree again, by a rule that nobody can abuse."""

from __future__ import annotations

import itertools
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.ledger import epochs, sealing
from swarm.ledger.entries import Sealed, SealedLog
from swarm.ledger.sealing import Place
from swarm.ledger.state import Authority, Record
from tests.ledger.harness import ALICE, BOB, OWNER, TRAINER, Peer, identity
from tests.ledger.test_epochs import Run, a_swarm, honest_block
from tests.network.harness import manifest

CAROL = identity(8)


@asynccontextmanager
async def four(folder: Path) -> AsyncIterator[tuple[Run, Peer, Peer, Peer, Peer]]:
    """A run with the trainer and three validators."""
    swarm = a_swarm(folder, [ALICE, BOB, CAROL])
    async with (
        swarm.peer(TRAINER) as trainer,
        swarm.peer(ALICE) as alice,
        swarm.peer(BOB) as bob,
        swarm.peer(CAROL) as carol,
    ):
        yield Run(swarm, [trainer, alice, bob, carol]), trainer, alice, bob, carol


async def test_what_a_former_first_peer_began_is_finished(tmp_path: Path) -> None:
    """A takeover between the seal of one first trusted peer and the others' signatures."""
    async with four(tmp_path) as (run, trainer, alice, bob, carol):
        await run.advance(40)
        await run.look(rounds=0)
        for peer, block in [(each, honest_block(run, each)) for each in (alice, bob)]:
            await peer.trusted.append(block)
        await run.advance(5)
        await run.look()
        (told,) = trainer.events("ledger.sealed")
        assert told["step"] == 40 - run.authority.rules.hold_steps, "it seals what they sealed"
        for peer in (trainer, alice, bob, carol):
            assert min(run.starts(peer)[:3]) > 20, "pruned"
            assert not peer.events("ledger.false_seal")


async def test_two_seals_that_crossed_on_the_wire_give_way_to_a_third(tmp_path: Path) -> None:
    async with four(tmp_path) as (run, trainer, alice, bob, carol):
        await run.advance(40)
        await run.look(rounds=0)
        sides = {0: (alice, bob), 3: (trainer, carol)}
        blocks = [(p, honest_block(run, p, less=n)) for n, side in sides.items() for p in side]
        for peer, block in blocks:
            await peer.trusted.append(block)
        await run.advance(10)
        await run.look(rounds=0)
        whole = run.totals(trainer)
        await run.look()
        for peer in (trainer, alice, bob, carol):
            (told,) = peer.events("ledger.sealed")
            assert told["epoch"] == 0 and told["step"] == 50 - run.authority.rules.hold_steps
            assert not peer.events("ledger.false_seal")
            assert min(run.starts(peer)[:3]) > 20, run.starts(peer)
            assert run.totals(peer) == whole
        await run.advance(40)
        await run.look()
        assert trainer.events("ledger.sealed")[-1]["epoch"] == 1
        assert not carol.events("ledger.false_seal")


def test_a_run_that_loses_a_peer_for_good_seals_with_its_successor(tmp_path: Path) -> None:
    """A seal that names a peer that the owner has replaced since is lost, and holds nothing up."""
    trusted = [TRAINER.peer_id, ALICE.peer_id, BOB.peer_id]
    before = Authority.of((OWNER.peer_id,), manifest([TRAINER], [ALICE, CAROL]))
    now = Authority.of((OWNER.peer_id,), manifest([TRAINER], [ALICE, BOB]))
    place = _place(TRAINER.peer_id, 5, _seal(before.trusted, before, [5, 5, 5], 1))
    seals: dict[str, list[Place]] = {TRAINER.peer_id: [place]}
    assert not sealing.is_lost(seals, place, before)
    assert now.trusted == trusted and sealing.is_lost(seals, place, now)


# --- the rule by itself, in every order of votes ------------------------------------------------

PEERS = sorted(identity(20 + number).peer_id for number in range(5))
VOTERS = Authority.of((OWNER.peer_id,), manifest([identity(20)], []))


def _authority(count: int) -> Authority:
    return replace(VOTERS, trusted=PEERS[:count])


def _seal(trusted: Any, authority: Authority, sizes: list[int], step: int) -> Sealed:
    logs = [
        SealedLog(owner=owner, size=size, root=bytes(32), first=0)
        for owner, size in sorted(zip(trusted, sizes, strict=True))
    ]
    rules = epochs.rules_digest(authority)
    return Sealed(
        epoch=0, lineage=0, step=step, logs=logs, rules=rules, block=0,
        totals=epochs.totals_digest({}),
    )  # fmt: skip


def _place(owner: str, position: int, seal: Sealed) -> Place:
    return Place(owner, position, seal.epoch, epochs.stated(seal))


@settings(max_examples=150, deadline=None)
@given(count=st.integers(3, 5), seed=st.integers(0, 2**32), turns=st.integers(5, 60))
def test_two_seals_of_an_epoch_never_both_win_and_one_wins_in_the_end(
    count: int, seed: int, turns: int
) -> None:
    """Whoever is the first peer, whatever each has seen of the others' logs, and when."""
    draw, authority = random.Random(seed), _authority(count)
    trusted, steps = list(authority.trusted), itertools.count(1)
    sizes = dict.fromkeys(trusted, 0)
    truth: dict[str, list[Place]] = {peer: [] for peer in trusted}
    seen = {peer: dict.fromkeys(trusted, 0) for peer in trusted}

    def view(peer: str) -> dict[str, list[Place]]:
        return {o: [p for p in truth[o] if p.position < seen[peer][o]] for o in trusted}

    def catch_up(peer: str) -> None:
        for other in trusted:
            if other == peer or draw.random() < 0.5:
                seen[peer][other] = sizes[other]

    def vote(peer: str, seal: Sealed) -> None:
        sizes[peer] += 1
        truth[peer].append(_place(peer, sizes[peer] - 1, seal))
        seen[peer][peer] = sizes[peer]

    def turn(peer: str, first: str) -> None:
        seals = view(peer)
        if sealing.newest_agreed(seals, trusted) is not None:
            return
        if peer != first:
            theirs = seals[first][-1:]
            if theirs and sealing.may_follow(seals, peer, theirs[0], authority):
                vote(peer, theirs[0].says)
            return
        if not all(sealing.is_lost(seals, place, authority) for place in seals[peer]):
            return
        for place in sealing.adoptable(seals, 0, authority):
            if sealing.may_follow(seals, peer, place, authority):
                vote(peer, place.says)
                return
        covered = [seen[peer][owner] for owner in trusted]
        vote(peer, _seal(trusted, authority, covered, next(steps)))

    for _ in range(turns):
        peer = draw.choice(trusted)
        catch_up(peer)
        sizes[peer] += draw.randrange(2)  # other entries
        seen[peer][peer] = sizes[peer]
        turn(peer, draw.choice(trusted))  # takeovers, and peers that have not heard of them
    for _, peer in itertools.product(range(6), trusted):  # then all hear all
        for reader in trusted:
            seen[reader] = dict(sizes)
        turn(peer, trusted[0])
    winners = {
        place.stated
        for log in truth.values()
        for place in log
        if sealing.agreed(truth, place, trusted)
    }
    assert len(winners) == 1
    assert max(len(log) for log in truth.values()) <= turns


def test_one_peer_alone_makes_nobody_vote_twice() -> None:
    """A first peer that seals again and again gets one vote of each other peer."""
    authority = _authority(4)
    liar, alice, bob, _ = authority.trusted
    first = _seal(authority.trusted, authority, [3, 3, 3, 3], 1)
    seals = {liar: [_place(liar, 3, first)], alice: [_place(alice, 3, first)]}
    for step in range(2, 6):
        again = _seal(authority.trusted, authority, [9, 9, 9, 9], step)
        seals[liar].append(_place(liar, 8 + step, again))
        assert not sealing.may_follow(seals, alice, seals[liar][-1], authority)
    assert sealing.may_follow(seals, bob, seals[liar][-1], authority), "who has not voted may"


@pytest.mark.parametrize("times", [1, 3])
def test_a_log_that_repeats_a_seal_has_one_vote(times: int) -> None:
    authority = _authority(3)
    seal = _seal(authority.trusted, authority, [3, 3, 3], 1)
    log = [Record(PEERS[0], index, seal) for index in range(1, times + 1)]
    assert epochs.base_of([log], authority.trusted).frontier.step == -1
