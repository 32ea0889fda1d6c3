"""Invites: each admits one peer, and all trusted peers know which."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import trio

from swarm.errors import UserError
from swarm.run.invites import check_token, invite_in, invite_problem, make_invite
from swarm.run.manifest import manifest_in
from swarm.run.run import Run
from swarm.wire.envelope import Envelope
from swarm.wire.identity import Identity
from swarm.wire.manifest import Admissions
from swarm.wire.messages import Admission, AdmissionRefused, AdmissionRequest, Invite
from swarm.wire.messenger import first
from tests.ledger.harness import ALICE, BOB, OWNER, WORKER, Peer, Swarm, identity
from tests.network.harness import sealed_manifest
from tests.worlds import WALL

THIEF = identity(9)


class InviteSwarm(Swarm):
    """A run that admits by invite."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        message = manifest_in(self.manifest)
        self.manifest = sealed_manifest(
            OWNER, msgspec.structs.replace(message, admissions=Admissions(policy="invite"))
        )

    def invite(self, *, seconds: float = 3600.0) -> Envelope:
        return invite_in(make_invite(OWNER, self.run, wall_time=WALL, lifetime_seconds=seconds))


async def ask(peer: Peer, trusted: Identity, *shown: Envelope) -> str:
    """Ask for admission; the reason of a refusal, or an empty string."""
    node = peer.run_node
    request = await node.seal(AdmissionRequest(roles=["inference"]), 60)
    reply = await node.messenger.request(trusted.peer_id, request, *shown)
    refusal = first(reply, AdmissionRefused)
    if refusal is None:
        assert first(reply, Admission) is not None
        return ""
    assert not refusal.expect(AdmissionRefused).later
    return refusal.expect(AdmissionRefused).reason


async def test_an_invite_admits_one_peer_which_may_return_without_it(tmp_path: Path) -> None:
    swarm = InviteSwarm(tmp_path)
    invite = swarm.invite()
    async with (
        swarm.peer(ALICE),
        swarm.peer(BOB) as bob,
        swarm.apart(WORKER) as worker,
        swarm.apart(THIEF) as thief,
        trio.open_nursery() as nursery,
    ):
        for peer in (worker, thief):
            await nursery.start(peer.run_node.messenger.run)
        assert "only peers with an invite" in await ask(worker, ALICE)
        assert await ask(worker, ALICE, invite) == ""
        await bob.until(
            lambda: bob.trusted.invites.holder(invite.expect(Invite).id) is not None,
            "the entry is mirrored",
        )
        for trusted in (ALICE, BOB):
            assert "another peer has used" in await ask(thief, trusted, invite)
            assert await ask(worker, trusted) == "", "it is bound to the key"
        nursery.cancel_scope.cancel()


async def test_of_two_peers_with_one_invite_the_earlier_stays(tmp_path: Path) -> None:
    """Two trusted peers that do not hear each other redeem it for both, until their logs meet."""
    swarm = InviteSwarm(tmp_path)
    invite = swarm.invite()

    async def redeem(trusted: Identity, key: Identity) -> None:
        async with swarm.peer(trusted), swarm.apart(key) as peer, trio.open_nursery() as nursery:
            await nursery.start(peer.run_node.messenger.run)
            assert await ask(peer, trusted, invite) == ""
            assert await ask(peer, trusted) == ""
            nursery.cancel_scope.cancel()

    await redeem(ALICE, WORKER)
    await redeem(BOB, THIEF)
    async with (
        swarm.peer(ALICE) as alice,
        swarm.peer(BOB) as bob,
        swarm.apart(WORKER) as worker,
        swarm.apart(THIEF) as thief,
        trio.open_nursery() as nursery,
    ):
        for peer in (worker, thief):
            await nursery.start(peer.run_node.messenger.run)
        for trusted in (alice, bob):
            await trusted.until(
                lambda trusted=trusted: bool(  # type: ignore[misc]
                    trusted.trusted.invites.invites_of(WORKER.peer_id)
                    and trusted.trusted.invites.invites_of(THIEF.peer_id)
                ),
                "the logs meet",
            )
        for key in (ALICE, BOB):
            assert await ask(worker, key) == ""
            assert "another peer has used" in await ask(thief, key, invite)
        nursery.cancel_scope.cancel()


class Book:
    """No invite was used."""

    def holder(self, _invite: bytes) -> str | None:
        return None

    def invites_of(self, _peer: str) -> Sequence[bytes]:
        return []


@pytest.mark.parametrize(
    ("owner", "of", "seconds", "reason"),
    [
        (OWNER, "", 60.0, None),
        (OWNER, "", -1.0, "expired on 20"),
        (OWNER, "2", 60.0, "is for the run"),
        (THIEF, "", 60.0, "is for the run"),
    ],
)
def test_an_invite_that_does_not_fit_is_refused_with_a_way_out(
    tmp_path: Path, owner: Identity, of: str, seconds: float, reason: str | None
) -> None:
    run = Run(InviteSwarm(tmp_path).manifest)
    token = make_invite(owner, run.id + of, wall_time=WALL, lifetime_seconds=seconds)
    found = invite_problem(Book(), run, WORKER.peer_id, invite_in(token), WALL)  # type: ignore[arg-type]
    assert (found is None) == (reason is None)
    assert reason is None or (reason in str(found) and "ask its owner" in str(found))
    if "run" in (reason or ""):
        with pytest.raises(UserError, match="is for the run"):
            check_token(token, run)
    else:
        assert check_token(token, run) is not None


@pytest.mark.parametrize("cut", [slice(0, -9), slice(3, None), slice(0, 0), slice(0, 13)])
def test_a_token_that_was_not_copied_whole_is_told_of(tmp_path: Path, cut: slice) -> None:
    swarm = InviteSwarm(tmp_path)
    token = make_invite(OWNER, swarm.run, wall_time=WALL, lifetime_seconds=60.0)
    assert len(token) < 600 and token.isascii()
    spaced = " ".join([token[:40], token[40:]]) + "\n"
    assert invite_in(spaced).raw == invite_in(token).raw, "a line break does no harm"
    with pytest.raises(UserError, match="copy all of the text"):
        invite_in(token[cut])
