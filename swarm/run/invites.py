"""Invites: the owner's signed permissions to join a run, each for one peer.

An invite's token is text that the owner hands to a person. It belongs to the first peer that shows
it to a trusted peer, which logs that; the peer may leave and return without it."""

import base64
import binascii
import secrets
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import trio

from swarm.errors import UserError
from swarm.events import Events
from swarm.ledger.entries import Entry, Redeemed
from swarm.ledger.redeemed_invites import RedeemedInvites
from swarm.run.run import Run
from swarm.wire.envelope import Dropped, Envelope, open_envelope, seal
from swarm.wire.identity import Identity
from swarm.wire.messages import INVITE_ID_BYTES, Invite
from swarm.world import Database, World

TOKEN_PREFIX = "swarm-invite-"

TOKEN_CHARACTERS_MAX = 2000
"""Longest token that is read; one with the longest run name has fewer than 600 characters."""

ASK = "ask its owner for another one"


def make_invite(owner: Identity, run: str, *, wall_time: float, lifetime_seconds: float) -> str:
    """Sign an invite as the owner of a run; returns its token."""
    envelope = seal(
        owner,
        Invite(id=secrets.token_bytes(INVITE_ID_BYTES)),
        run=run,
        sequence=int(wall_time * 1000),
        wall_time=wall_time,
        lifetime_seconds=lifetime_seconds,
    )
    return TOKEN_PREFIX + base64.urlsafe_b64encode(envelope.raw).decode().rstrip("=")


def invite_in(token: str) -> Envelope:
    """Return the signed invite in a token; raises `UserError` if it is none."""
    text = "".join(token.split())
    try:
        if not text.startswith(TOKEN_PREFIX) or len(text) > TOKEN_CHARACTERS_MAX:
            raise ValueError("another beginning or length")
        coded = text.removeprefix(TOKEN_PREFIX)
        envelope = open_envelope(base64.urlsafe_b64decode(coded + "=" * (-len(coded) % 4)))
        if not isinstance(envelope.message, Invite):
            raise ValueError("another message")
    except (ValueError, binascii.Error, Dropped) as error:
        raise UserError(
            f"--invite: {text[:24]!r}… is not a whole invite; copy all of the text that begins "
            f"with {TOKEN_PREFIX}, as the run's owner sent it"
        ) from error
    return envelope


def check_token(token: str, run: Run) -> Envelope | None:
    """Return the invite that a peer's settings name, or None for no token.

    Raises `UserError` if it is malformed or for another run. An expired one may have been redeemed
    by this peer before, so the trusted peers decide on that."""
    if not token:
        return None
    envelope = invite_in(token)
    if envelope.body.run != run.id or envelope.sender != run.owner:
        raise UserError(f"--invite: {_for_another_run(envelope)}, and this is {run.id}")
    return envelope


class Invites(RedeemedInvites):
    """The invites of a run at a trusted peer, which logs who redeems them."""

    def __init__(
        self,
        database: Database,
        world: World,
        events: Events,
        append: Callable[[list[Entry]], Awaitable[None]],
    ) -> None:
        """`append` makes entries of this peer's log durable."""
        super().__init__(database)
        self._world = world
        self._events = events
        self._append = append
        self._writing = trio.Lock()

    async def redeem(self, shown: Envelope, peer: str) -> None:
        """Log that a peer redeems an invite, unless it is redeemed already."""
        invite = shown.expect(Invite).id
        async with self._writing:
            if self.holder(invite) is None:
                now_ms = max(int(self._world.wall_time() * 1000), shown.body.issued_ms)
                await self._append(
                    [Redeemed(invite=invite, peer=peer, redeemed_ms=now_ms, envelope=shown.raw)]
                )
                self._events.emit("membership.invite_redeemed", remote=peer, invite=invite.hex())


def invite_problem(
    book: RedeemedInvites, run: Run, peer: str, shown: Envelope | None, wall_time: float
) -> str | None:
    """Return why neither an earlier invite nor the one that it shows admits a peer, or None."""
    redeemed = book.invites_of(peer)
    problem = ""
    for invite in redeemed:
        problem = _used_up(book, invite, peer)
        if not problem:
            return None
    if shown is None:
        return problem or (
            "this run admits only peers with an invite; ask its owner for one and start with "
            "--invite TOKEN"
        )
    if shown.body.run != run.id or shown.sender != run.owner:
        return f"{_for_another_run(shown)}; join that run, or {ASK}"
    invite = shown.expect(Invite).id
    problem = _used_up(book, invite, peer)
    if not problem and shown.body.expires_ms <= wall_time * 1000:
        when = datetime.fromtimestamp(shown.body.expires_ms / 1000, UTC)
        problem = f"the invite expired on {when:%Y-%m-%d %H:%M} UTC; {ASK}"
    return problem or None


def _used_up(book: RedeemedInvites, invite: bytes, peer: str) -> str:
    if book.holder(invite) not in (None, peer):
        return (
            "another peer has used this invite, and it admits only one; start with the key that "
            f"used it, or {ASK}"
        )
    return ""


def _for_another_run(envelope: Envelope) -> str:
    return f"the invite is for the run {envelope.body.run}"
