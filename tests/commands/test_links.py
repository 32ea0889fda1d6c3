"""Invite links: their one spelling, and what is said about every other."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.errors import UserError
from swarm.run import links
from swarm.run.invites import make_invite
from swarm.run.links import ADDRESSES_MAX, ROLES, Link, invite_of, make_link, parse_link
from swarm.run.manifest import manifest_in
from swarm.run.update import sign_manifest
from swarm.wire.identity import Identity, load_or_create
from swarm.wire.manifest import Admissions
from tests.commands.harness import NOBODY, complaint, signed_manifest, swarm

OWNER, OTHER = Identity(bytes(32)), Identity(bytes([9]) * 32)
RUN = f"{OWNER.peer_id}/sorting"


def with_checksum(body: str) -> str:
    return f"{body}#{links._checksum(body)}"


NAMED = NOBODY.replace("/ip4/127.0.0.1", "/dns4/boot.example.org")
TEXT = make_link(Link(RUN, (NOBODY, NAMED)))


def test_a_link_has_one_spelling() -> None:
    assert with_checksum(f"swarm://{RUN}?bootstrap={NOBODY}&bootstrap={NAMED}") == TEXT
    assert parse_link(TEXT) == Link(RUN, (NOBODY, NAMED))
    assert parse_link(f"  {TEXT[:50]}\n{TEXT[50:]} ") == parse_link(TEXT), "as mail breaks lines"


hosts = st.ip_addresses(v=4).map(lambda host: f"/ip4/{host}/tcp/4001/p2p/{OTHER.peer_id}")
names = st.from_regex(r"[a-z0-9][a-z0-9-]{0,62}", fullmatch=True)


@settings(max_examples=50)
@given(names, st.lists(hosts, min_size=1, max_size=ADDRESSES_MAX), st.sampled_from(ROLES))
def test_what_is_written_is_read_again(name: str, addresses: list[str], role: str) -> None:
    link = Link(f"{OWNER.peer_id}/{name}", tuple(addresses), role=role)
    assert parse_link(make_link(link)) == link


@settings(max_examples=200)
@given(st.integers(0, len(TEXT) - 1), st.characters(codec="utf-8"))
def test_no_mistyped_character_passes(at: int, typed: str) -> None:
    mistyped = TEXT[:at] + typed + TEXT[at + 1 :]
    if typed.isspace() or "".join(mistyped.split()) == TEXT:
        return
    with pytest.raises(UserError):
        parse_link(mistyped)


@settings(max_examples=100)
@given(st.text())
def test_no_text_breaks_the_reader(text: str) -> None:
    for given_text in (text, f"swarm://{text}", with_checksum(f"swarm://{RUN}?bootstrap={text}")):
        with pytest.raises(UserError):
            parse_link(given_text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("https://example.org", "is not an invite link; one begins with swarm://"),
        (TEXT[: TEXT.index("&")], "is cut off; copy all of it, and put it in quotes"),
        (TEXT[:-1], "is cut off"),
        (TEXT.replace("sorting", "sortnig"), "is damaged: its checksum is"),
        (with_checksum(f"swarm://{RUN}?x"), "the link's parameters cannot be read"),
        (with_checksum(f"swarm://{RUN}?role=relay"), "has 0 bootstrap addresses; it must have 1"),
        (with_checksum(f"swarm://{RUN}?bootstrap=/ip4/1"), "is not a multiaddr"),
        (with_checksum(f"swarm://{RUN}?bootstrap={NOBODY}&colour=red"), "a parameter 'colour'"),
        (with_checksum(f"swarm://{RUN}?bootstrap={NOBODY}&role=trainer"), "the role 'trainer'"),
        (with_checksum(f"swarm://{RUN}?role=relay&bootstrap={NOBODY}"), "is not written as swarm"),
        (with_checksum(f"swarm://me/sorting?bootstrap={NOBODY}"), "names 'me' as the run's owner"),
        (with_checksum(f"swarm://{OWNER.peer_id}/A?bootstrap={NOBODY}"), "no run can have that"),
        ("swarm://" + "x" * 5000, "the link has 5008 characters, and 4096 are the most"),
    ],
)
def test_each_mistake_is_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        parse_link(text)
    assert sentence in str(error.value)


def test_an_invite_admits_to_its_own_run_and_not_for_ever() -> None:
    now = time.time()
    token = make_invite(OWNER, RUN, wall_time=now, lifetime_seconds=60)
    assert invite_of(Link(RUN, (NOBODY,)), now) is None
    assert invite_of(Link(RUN, (NOBODY,), token), now) is not None
    with pytest.raises(UserError, match=r"expired on \d{4}-"):
        invite_of(Link(RUN, (NOBODY,), token), now + 61)
    with pytest.raises(UserError, match="is for the run"):
        invite_of(Link(f"{OWNER.peer_id}/other", (NOBODY,), token), now)


@pytest.fixture
def invited(tmp_path: Path) -> Path:
    """A folder with the owner's key and the signed manifest of a run that admits by invite."""
    owner = load_or_create(tmp_path / "owner.key")
    message = manifest_in(signed_manifest(tmp_path / "tokenizer", owner))
    invited = msgspec.structs.replace(message, admissions=Admissions(policy="invite"))
    (tmp_path / "run.manifest").write_bytes(sign_manifest(owner, invited, time.time()).raw)
    return tmp_path


def test_the_owner_makes_links_each_with_an_invite(invited: Path) -> None:
    made = swarm("run", "link", invited, "--bootstrap", NOBODY, "--count=2", "--expires=12h")
    assert made.status == 0, made.errors
    first, second = map(parse_link, made.output.splitlines())
    assert first.invite != second.invite and first.run == second.run
    invite = invite_of(first, time.time())
    assert invite is not None
    assert invite.body.expires_ms - invite.body.issued_ms == 12 * 3600 * 1000
    assert "is an address of this machine alone" in made.errors
    said = complaint("run", "link", invited, "--bootstrap", "/ip4/1")
    assert "is not a multiaddr" in said
    many = [f"--bootstrap={NAMED.replace('boot', f'boot{n}')}" for n in range(9)]
    assert "has 9 bootstrap addresses" in complaint("run", "link", invited, *many)


def test_what_goes_wrong_is_said_in_one_sentence(invited: Path) -> None:
    def said(place: Path, *options: str | Path) -> str:
        return complaint("run", "link", place, "--bootstrap", NOBODY, *options)

    assert "30m, 12h or 7d" in said(invited, "--expires", "soon")
    assert "between 1 and" in said(invited, "--count", "0")
    assert "type swarm run create" in said(invited / "mistyped.toml")
    load_or_create(invited / "another.key")
    assert "only that key" in said(invited / "run.toml", "--owner-key", invited / "another.key")
    (invited / "other.manifest").write_bytes((invited / "run.manifest").read_bytes())
    assert "should have one signed manifest" in said(invited)


def test_an_open_run_has_one_link_for_everybody(tmp_path: Path) -> None:
    owner = load_or_create(tmp_path / "owner.key")
    (tmp_path / "run.manifest").write_bytes(signed_manifest(tmp_path / "tokenizer", owner).raw)
    made = swarm("run", "link", tmp_path, "--bootstrap", NOBODY, "--count=2")
    assert made.status == 0 and not parse_link(made.output.strip()).invite
    assert "one link is for everybody" in made.errors
