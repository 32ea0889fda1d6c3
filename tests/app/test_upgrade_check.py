"""`swarm upgrade-check`: what a new build finds in a home and in its run."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from swarm.app.upgrade_check import _peers
from swarm.identity import load_or_create
from swarm.messages import Heartbeat, Present
from swarm.protocol import PROTOCOL_VERSION
from swarm.world.home_format import FORMAT_FILE, HOME_FORMAT, open_format
from tests.app.harness import NOBODY, swarm
from tests.network.harness import identity, manifest, sealed_manifest
from tests.world.test_home_format import home_of_format_1

OWNER, TRAINER, VALIDATOR, WORKER = (identity(number) for number in range(1, 5))


def checked(*arguments: str | Path) -> dict[str, dict[str, Any]]:
    """The lines by topic, the last of each; the command leaves the home as it was."""
    outcome = swarm("upgrade-check", "--json", *arguments)
    found = {each["topic"]: each for each in json.loads(outcome.output)}
    assert outcome.status == any(each["problem"] for each in found.values())
    return found


def give_key(home: Path) -> None:
    (home / "identity.key").unlink(missing_ok=True)
    load_or_create(home / "identity.key")


def test_an_older_home_can_be_taken_over(tmp_path: Path) -> None:
    home = home_of_format_1(tmp_path / "home")
    give_key(home)
    found = checked("--home", home)
    assert (found["home"]["format"], found["home"]["becomes"]) == (1, HOME_FORMAT)
    assert found["home"]["needs_bytes"] > 0 and "first start migrates it" in found["home"]["text"]
    assert not (home / FORMAT_FILE).exists() and not any(f["problem"] for f in found.values())
    open_format(home)
    assert "has this build's format" in checked("--home", home)["home"]["text"]


def test_what_cannot_be_taken_over_is_a_problem(tmp_path: Path) -> None:
    home = home_of_format_1(tmp_path / "home")
    (home / "identity.key").unlink()
    assert "its identity.key is missing" in checked("--home", home)["home"]["text"]
    give_key(home)
    with closing(sqlite3.connect(home / "peer.sqlite", isolation_level=None)) as connection:
        plain = sealed_manifest(OWNER, manifest([TRAINER], [VALIDATOR])).raw
        connection.execute("INSERT INTO manifests VALUES ('r', 1, ?), ('r', 2, ?)", (plain, b"x"))
    state = home / "trainer" / "states" / "0-3"
    state.mkdir(parents=True)
    (state / "state.json").write_text('{"version": 1}')
    found = checked("--home", home)
    assert {topic for topic, each in found.items() if each["problem"]} == {"state"}
    assert "0-3: version 1, and this build resumes from 2" in found["state"]["text"]
    text = swarm("upgrade-check", "--home", home).output
    assert "manifest   PROBLEM: a stored manifest cannot be read (malformed" in text
    (home / FORMAT_FILE).write_text(json.dumps({"format": HOME_FORMAT + 1}))
    assert "start it with the newer Swarm" in checked("--home", home)["home"]["text"]


def test_a_home_that_does_not_exist_is_fine_and_a_network_that_does_not_is_not(
    tmp_path: Path,
) -> None:
    found = checked("--home", tmp_path / "nowhere", "--bootstrap", NOBODY)
    assert not found["home"]["problem"] and found["run"]["problem"]
    assert found["program"]["protocol"] == PROTOCOL_VERSION
    assert not (tmp_path / "nowhere").exists()
    other = tmp_path / "etc"
    other.mkdir()
    assert not checked("--home", other)["home"]["problem"], "a volume that is new"
    (other / "passwd").touch()
    assert "no peer has used it" in checked("--home", other)["home"]["text"]


def test_the_builds_of_the_runs_peers_are_counted_and_old_trusted_ones_named() -> None:
    wanted = manifest([TRAINER], [VALIDATOR])

    def present(peer: str, role: str, protocol: int, build: str) -> Present:
        heartbeat = Heartbeat(roles=[role], protocol=protocol, build=build)
        return Present(peer=peer, heartbeat=heartbeat, age_seconds=0.0, standing="live")

    peers = [
        present(TRAINER.peer_id, "trainer", 2, "0.2.0"),
        present(VALIDATOR.peer_id, "validator", 1, ""),
        present(WORKER.peer_id, "inference", 1, ""),
    ]
    newer, older = _peers(peers, wanted)
    assert newer.text == "1 of 3 peers speak protocol version 2 (swarm 0.2.0): trainer"
    assert older.text.startswith("2 of 3 peers speak protocol version 1 (an older build)")
    assert not older.problem
    (_, older) = _peers(peers, msgspec.structs.replace(wanted, needs=2))
    assert older.problem and older.text.endswith(f"the run needs 2, so upgrade {VALIDATOR.peer_id}")
