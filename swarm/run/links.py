"""Invite links: a run, its owner and a way into its network in one text.

    swarm://<owner peer id>/<name>?bootstrap=<address>&…[&invite=<token>][&role=<role>]#<checksum>

A run's id contains its owner's peer id, so a link pins the owner: a manifest that another key
signed has another id. The checksum finds a link that was cut off or mistyped; it proves nothing. A
link has one spelling, so that equal links are equal texts. (docs/decisions/0042-invite-links.md)"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import parse_qsl, quote

from blake3 import blake3

from swarm.errors import UserError
from swarm.run.invites import invite_in
from swarm.transport.libp2p.addresses import require_peer
from swarm.wire.envelope import Envelope
from swarm.wire.identity import InvalidPeerId, public_key_of

SCHEME = "swarm://"

LINK_CHARACTERS_MAX = 4096
"""Longest link: an invite of 600 characters, and more addresses than one needs."""

ADDRESSES_MAX = 8
"""Most bootstrap addresses of a link."""

CHECKSUM_CHARACTERS = 8
"""Hexadecimal characters of BLAKE3: one in 4 billion mistyped links passes."""

ROLES = ("inference", "relay", "observer")
"""Roles that a link may name: those that a run admits without naming the peer."""

_RUN_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


@dataclass(frozen=True)
class Link:
    """What an invite link says."""

    run: str
    """`<owner peer id>/<name>`."""
    bootstrap: tuple[str, ...]
    invite: str = ""
    """Token of an invite, for a run that admits by invite."""
    role: str = "inference"

    @property
    def owner(self) -> str:
        return self.run.partition("/")[0]

    def __str__(self) -> str:
        fields = [("bootstrap", each) for each in self.bootstrap]
        fields += [("invite", self.invite)] if self.invite else []
        fields += [("role", self.role)] if self.role != "inference" else []
        query = "&".join(f"{name}={quote(value, safe='/:')}" for name, value in fields)
        text = f"{SCHEME}{self.run}?{query}"
        return f"{text}#{_checksum(text)}"


def make_link(link: Link) -> str:
    """Write a link; raises `UserError` for one that nobody could follow."""
    text = str(link)
    if len(text) > LINK_CHARACTERS_MAX:
        raise UserError(
            f"the link would have {len(text)} characters, and {LINK_CHARACTERS_MAX} are the most; "
            "give fewer --bootstrap addresses"
        )
    parse_link(text)
    return text


def parse_link(given: str) -> Link:
    """Parse an invite link. Raises `UserError`, in the order in which a mistake is likely."""
    text = "".join(given.split())
    shown = f"{text[:40]!r}…" if len(text) > 40 else repr(text)
    if not text.startswith(SCHEME):
        raise UserError(f"{shown} is not an invite link; one begins with {SCHEME}")
    if len(text) > LINK_CHARACTERS_MAX:
        raise UserError(
            f"the link has {len(text)} characters, and {LINK_CHARACTERS_MAX} are the most; ask "
            "for another one"
        )
    body, mark, checksum = text.partition("#")
    if not mark or len(checksum) < CHECKSUM_CHARACTERS:
        raise UserError(
            f"the link {shown} is cut off; copy all of it, and put it in quotes: a shell reads & "
            "and # itself"
        )
    if checksum != _checksum(body):
        raise UserError(
            f"the link {shown} is damaged: its checksum is {checksum[:16]!r}, and its text gives "
            f"{_checksum(body)}; copy it again from where you got it"
        )
    link = _parsed(body)
    if str(link) != text:
        raise UserError(
            f"the link {shown} is not written as swarm run link writes it; ask for another one"
        )
    return link


def invite_of(link: Link, wall_time: float) -> Envelope | None:
    """Return the invite in a link, if it has one; raises `UserError` if it can admit nobody."""
    if not link.invite:
        return None
    envelope = invite_in(link.invite)
    if envelope.body.run != link.run:  # its signer may be a successor of the first owner
        raise UserError(
            f"the invite in the link is for the run {envelope.body.run}, and the link for "
            f"{link.run}; ask the run's owner for another link"
        )
    if envelope.body.expires_ms <= wall_time * 1000:
        when = datetime.fromtimestamp(envelope.body.expires_ms / 1000, UTC)
        raise UserError(
            f"the invite in the link expired on {when:%Y-%m-%d %H:%M} UTC; ask the run's owner "
            "for another link"
        )
    return envelope


def _parsed(body: str) -> Link:
    run, _, query = body.removeprefix(SCHEME).partition("?")
    owner, _, name = run.partition("/")
    try:
        public_key_of(owner)
    except InvalidPeerId as error:
        raise UserError(f"the link names {owner[:60]!r} as the run's owner: {error}") from error
    if not _RUN_NAME.fullmatch(name):
        raise UserError(f"the link names {name[:80]!r} as the run, and no run can have that name")
    addresses: list[str] = []
    once: dict[str, str] = {}
    for key, value in _fields(query):
        if key == "bootstrap":
            addresses.append(value)
        elif key in ("invite", "role") and key not in once:
            once[key] = value
        else:
            raise UserError(
                f"the link has a parameter {key[:40]!r} that this version of Swarm does not know, "
                "or has it twice; install a newer version, or ask for another link"
            )
    if not 1 <= len(addresses) <= ADDRESSES_MAX:
        raise UserError(
            f"the link has {len(addresses)} bootstrap addresses; it must have 1 to {ADDRESSES_MAX}"
        )
    for address in addresses:
        require_peer(address)
    role = once.get("role", "inference")
    if role not in ROLES:
        raise UserError(f"the link asks for the role {role[:40]!r}; there are: {', '.join(ROLES)}")
    return Link(run, tuple(addresses), once.get("invite", ""), role)


def _fields(query: str) -> list[tuple[str, str]]:
    try:
        return parse_qsl(
            query, keep_blank_values=True, strict_parsing=True, errors="strict", max_num_fields=16
        )
    except (ValueError, UnicodeDecodeError) as error:
        raise UserError(f"the link's parameters cannot be read ({error})") from error


def _checksum(body: str) -> str:
    return blake3(body.encode("utf-8", "surrogateescape")).hexdigest()[:CHECKSUM_CHARACTERS]
