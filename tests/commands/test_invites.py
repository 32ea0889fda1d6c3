"""`swarm run invite`, `invites`, `revoke-invite`: what the owner types, and what goes wrong."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import pytest

from swarm.run.invites import invite_in
from swarm.run.manifest import manifest_in
from swarm.run.update import sign_manifest
from swarm.wire.identity import load_or_create
from swarm.wire.manifest import Admissions
from swarm.wire.messages import Invite
from tests.commands.harness import complaint, signed_manifest, swarm


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with the owner's key and the signed manifest of a run that admits by invite."""
    owner = load_or_create(tmp_path / "owner.key")
    message = manifest_in(signed_manifest(tmp_path / "tokenizer", owner))
    invited = msgspec.structs.replace(message, admissions=Admissions(policy="invite"))
    envelope = sign_manifest(owner, invited, time.time())
    (tmp_path / "run.manifest").write_bytes(envelope.raw)
    return tmp_path


@pytest.mark.parametrize("named", ["", "run.toml", "run.manifest"])
def test_tokens_are_printed_one_a_line_and_recorded(home: Path, named: str) -> None:
    made = swarm("run", "invite", home / named, "--count", "3", "--expires", "12h")
    assert made.status == 0, made.errors
    tokens = [invite_in(line) for line in made.output.splitlines()]
    ids = [token.expect(Invite).id.hex() for token in tokens]
    assert len(set(ids)) == 3
    assert all(each in made.errors for each in ids)
    recorded = [json.loads(line) for line in (home / "run.invites").read_text().splitlines()]
    assert [each["id"] for each in recorded] == ids
    assert {e.body.expires_ms - e.body.issued_ms for e in tokens} == {12 * 3600 * 1000}


def test_what_goes_wrong_is_said_in_one_sentence(home: Path, tmp_path: Path) -> None:
    assert "30m, 12h or 7d" in complaint("run", "invite", home, "--expires", "soon")
    assert "between 1 and" in complaint("run", "invite", home, "--count", "0")
    assert "neither an invite's id" in complaint("run", "revoke-invite", "xyz", home)
    assert "type swarm run create" in complaint("run", "invite", home / "mistyped.toml")
    (home / "other.manifest").write_bytes((home / "run.manifest").read_bytes())
    assert "should have one signed manifest" in complaint("run", "invite", home)
    load_or_create(home / "another.key")
    said = complaint("run", "invite", home / "run.manifest", "--owner-key", home / "another.key")
    assert "only that key" in said
    owner = load_or_create(home / "owner.key")
    signed = signed_manifest(home / "tokenizer", owner)
    (home / "open.manifest").write_bytes(signed.raw)
    assert "would admit nobody" in complaint("run", "invite", home / "open.manifest")
