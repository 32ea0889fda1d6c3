"""`swarm run update`: it prints the changes, refuses what peers would refuse, and hands the new
version to a running bootstrap peer."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.run.manifest import load_manifest, manifest_in
from swarm.wire.identity import load_or_create
from tests.commands.harness import bootstrap_peer, complaint, swarm
from tests.commands.test_commands import RUN, create

NEXT = RUN.replace("version = 3", "version = 4")


def signed(folder: Path) -> int:
    return manifest_in(load_manifest(folder / "run.manifest")).version


def update(folder: Path, text: str, *more: str) -> list[str | Path]:
    """Write a changed description to disk; return the arguments of `swarm run update`."""
    (folder / "run.toml").write_text(text)
    keys = ("--owner-key", folder / "owner.key", "--tokenizer", folder)
    return ["run", "update", folder / "run.toml", *keys, *more]


@pytest.fixture
def lab(tmp_path: Path) -> Path:
    """A folder with a signed run of version 3."""
    assert swarm(*create(tmp_path)).status == 0
    return tmp_path


def test_a_change_is_shown_with_its_moment_and_signed(lab: Path) -> None:
    text = NEXT.replace("max_new_tokens = 8", "max_new_tokens = 9").replace("100", "50")
    done = swarm(*update(lab, text.replace("6e-4", "3e-4")))
    assert done.status == 0, done.errors
    lines = [" ".join(line.split()) for line in done.output.splitlines()]
    assert lines[0].endswith("/sorting: version 3 → 4")
    assert lines[1:4] == [
        "sampling.max_new_tokens 8 → 9 from the next step",
        "schedule.steps 100 → 50 at once",
        "optimiser.learning_rate 0.0006 → 0.0003 from the next step",
    ]
    held = load_manifest(lab / "run.manifest")
    assert held.sender == load_or_create(lab / "owner.key").peer_id
    assert manifest_in(held).version == 4 and manifest_in(held).sampling.max_new_tokens == 9

    again = swarm(*update(lab, text.replace("6e-4", "3e-4")))
    assert again.status == 0 and "signed already, nothing has changed" in again.output
    assert load_manifest(lab / "run.manifest").raw == held.raw


@pytest.mark.parametrize("command", ["update", "create"])
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (RUN.replace("6e-4", "3e-4"), "learning_rate 0.0006 → 0.0003); raise version to 4"),
        (RUN.replace("version = 3", "version = 2"), "but version 3 is signed already; raise"),
        (NEXT.replace("demo/qwen2", "demo/qwen3"), "changes model, which is not possible in a"),
        (NEXT.replace("group_size = 8", "group_size = 1"), "a group needs at least 2 completions"),
    ],
)
def test_what_no_peer_would_take_is_refused(
    command: str, text: str, sentence: str, lab: Path
) -> None:
    before = (lab / "run.manifest").read_bytes()
    arguments = update(lab, text) if command == "update" else create(lab, text)
    assert sentence in complaint(*arguments)
    assert (lab / "run.manifest").read_bytes() == before


def test_only_the_owner_changes_a_run(lab: Path) -> None:
    load_or_create(lab / "another.key")
    arguments = update(lab, NEXT)
    arguments[arguments.index(lab / "owner.key")] = lab / "another.key"
    assert "only that key can change it" in complaint(*arguments)
    arguments[arguments.index(lab / "another.key")] = lab / "none.key"
    assert "there is no key" in complaint(*arguments)
    assert not (lab / "none.key").exists()
    (lab / "run.manifest").unlink()
    assert "sign the first version with swarm run create" in complaint(*update(lab, NEXT))


def test_a_running_bootstrap_peer_gets_it(lab: Path) -> None:
    first = (lab / "run.manifest").read_bytes()
    with bootstrap_peer(lab / "home", lab / "run.manifest") as multiaddr:
        faster = NEXT.replace("6e-4", "3e-4")
        done = swarm(*update(lab, faster, "--bootstrap", multiaddr))
        assert done.status == 0, done.errors
        assert f"bootstrap peer {multiaddr.rpartition('/')[2]} has it" in done.output
        shown = swarm("run", "show", "--bootstrap", multiaddr)
        assert "version = 4" in shown.output and "learning_rate = 0.0003" in shown.output

        # An owner whose file is older than the network cannot sign the same version again.
        (lab / "run.manifest").write_bytes(first)
        slower = update(lab, NEXT.replace("6e-4", "1e-4"), "--bootstrap", multiaddr)
        assert "learning_rate 0.0003 → 0.0001); raise version to 5" in complaint(*slower)
        assert signed(lab) == 3
