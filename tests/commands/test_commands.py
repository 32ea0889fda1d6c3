"""Commands with correct arguments."""

from __future__ import annotations

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from peers.engines.demo import save_tokenizer
from swarm.wire.envelope import open_envelope
from swarm.wire.identity import Identity, load_or_create
from swarm.wire.manifest import RunManifest
from tests.commands.harness import bootstrap_peer, complaint, signed_manifest, swarm

TRAINER = Identity(bytes([1]) * 32).peer_id
VALIDATOR = Identity(bytes([2]) * 32).peer_id
RUN = f"""
name = "sorting"
version = 3
model = "demo/qwen2"
broadcast_mode = "relay-only"
trainers = ["{TRAINER}"]
validators = ["{VALIDATOR}"]

[[environments]]
name = "sort-digits"
version = "1"

[sampling]
temperature = 1.0
max_new_tokens = 8
stop_ids = [2]
group_size = 8
groups_per_submission = 4

[schedule]
steps = 100
groups_per_step = 32

[optimiser]
learning_rate = 6e-4
"""


def create(folder: Path, text: str = RUN) -> list[str | Path]:
    """Write the files that `swarm run create` needs to `folder`; return its arguments."""
    save_tokenizer(folder)
    (folder / "run.toml").write_text(text)
    return [
        *("run", "create", folder / "run.toml", "--out", folder / "run.manifest"),
        *("--owner-key", folder / "owner.key", "--tokenizer", folder),
    ]


def test_a_model_that_is_no_folder_is_named(tmp_path: Path) -> None:
    *arguments, _, _ = create(tmp_path)
    said = complaint(*arguments)
    assert said == (
        f"{tmp_path}/run.toml: model demo/qwen2 is no folder here and not whole in the cache, and "
        "HF_HUB_OFFLINE is set; correct the name, or fetch it once without that; or name its "
        "tokenizer's folder with --tokenizer"
    )


def test_create_signs_and_show_verifies(tmp_path: Path) -> None:
    outcome = swarm(*create(tmp_path))
    assert outcome.status == 0
    assert stat.S_IMODE((tmp_path / "owner.key").stat().st_mode) == 0o600
    owner = load_or_create(tmp_path / "owner.key")
    envelope = open_envelope((tmp_path / "run.manifest").read_bytes())
    assert envelope.sender == owner.peer_id and isinstance(envelope.message, RunManifest)
    assert envelope.message.optimiser.learning_rate == 6e-4
    assert f"run {owner.peer_id}/sorting, version 3" in outcome.output

    shown = swarm("run", "show", tmp_path / "run.manifest")
    assert shown.status == 0
    assert f"{owner.peer_id} (signature verified)" in shown.output
    assert f"{TRAINER} (from version 1)" in shown.output
    assert 'broadcast_mode = "relay-only"\n' in shown.output
    assert '[[environments]]\n  name = "sort-digits"\n' in shown.output
    told = json.loads(swarm("run", "show", tmp_path / "run.manifest", "--json").output)
    assert told["run"] == f"{owner.peer_id}/sorting"
    assert told["schedule"]["steps"] == 100
    assert told["tokenizer_hash"] == envelope.message.tokenizer_hash.hex()


def test_create_again_keeps_the_owner(tmp_path: Path) -> None:
    swarm(*create(tmp_path))
    first = open_envelope((tmp_path / "run.manifest").read_bytes())
    swarm(*create(tmp_path, RUN.replace("version = 3", "version = 4")))
    second = open_envelope((tmp_path / "run.manifest").read_bytes())
    assert first.sender == second.sender
    assert first.body.run == second.body.run and first.digest != second.digest


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("steps = 100", "stops = 100", "unknown key 'stops'"),
        ("steps = 100", 'steps = "many"', "steps is 'many'"),
        ("stop_ids = [2]", "", "sampling: stop_ids is missing"),
        ('version = "1"', 'version = "9"', "installed in version '1', but the run wants '9'"),
        ('"sort-digits"', '"chess"', "environment 'chess' is not installed here"),
        ('name = "sort-digits"', "", "environments[0]: name is missing"),
        (f'["{TRAINER}"]', '["nobody"]', "trainers: "),
        (
            "[optimiser]",
            "[objective]\ndelta = 1.1\n[optimiser]",
            "must be greater than 1 + epsilon",
        ),
        (
            'name = "sort-digits"',
            'where = "served"\nname = "sort-digits"',
            "environment_peers names nobody",
        ),
        ('name = "sort-digits"', 'weight = 0\nname = "sort-digits"', "none would give a task"),
        ("[schedule]", "[schedule", "is not valid TOML"),
        ('"relay-only"', '"closed"', "broadcast_mode is 'closed'"),
        ('"sorting"', '"So rting"', "name is 'So rting'"),
        ("[optimiser]", "[adapter]\nrank = 10000\n[optimiser]", "adapter: rank is 10000"),
        (
            "[optimiser]",
            '[adapter]\nrank = 8\ntargets = ["head"]\n[optimiser]',
            "adapter.targets names 'head'; there are: q_proj",
        ),
    ],
)
def test_create_refuses(old: str, new: str, sentence: str, tmp_path: Path) -> None:
    assert old in RUN
    assert sentence in complaint(*create(tmp_path, RUN.replace(old, new)))
    assert not (tmp_path / "run.manifest").exists()


def test_create_needs_a_tokenizer(tmp_path: Path) -> None:
    arguments = create(tmp_path)[:-1]
    assert "tokenizer.json cannot be read" in complaint(*arguments, tmp_path / "nowhere")


@pytest.mark.slow
def test_show_asks_a_bootstrap_peer(tmp_path: Path) -> None:
    envelope = signed_manifest(tmp_path, Identity(bytes(32)), "asked-for")
    (tmp_path / "run.manifest").write_bytes(envelope.raw)
    with bootstrap_peer(tmp_path / "home", tmp_path / "run.manifest") as multiaddr:
        shown = swarm("run", "show", "--bootstrap", multiaddr)
    assert shown.status == 0
    assert f"run      {envelope.body.run}\n" in shown.output


@pytest.mark.parametrize("command", [[], ["peer"], ["demo"], ["run"], ["status"], ["ledger"]])
def test_help_says_what_it_does(command: list[str]) -> None:
    outcome = swarm(*command, "--help")
    assert outcome.status == 0 and "Usage" in outcome.output


def test_both_ways_to_start_a_peer_know_the_same_flags() -> None:
    """Run both in processes of their own: the console script's function, and the module."""
    asked = [
        [sys.executable, "-m", "swarm.peer", "--help"],
        [sys.executable, "-c", "from swarm.commands.main import main; main()", "peer", "--help"],
    ]
    pages = [
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for command in asked
    ]
    flags = [{word for word in page.split() if word.startswith("--")} for page in pages]
    assert flags[0] == flags[1]
    assert {"--role", "--bootstrap", "--listen", "--home", "--config", "--run"} <= flags[0]


def test_the_help_loads_neither_commands_nor_what_takes_long_to_import() -> None:
    heavy = "{'torch', 'libp2p', 'pyarrow', 'trio', 'pydantic', 'rich'}"
    code = (
        "import sys\nfrom swarm.commands.main import main\ntry: main()\n"
        f"finally: print(sorted(m for m in sys.modules if m in {heavy} or m.startswith('peers')))"
    )
    command = [sys.executable, "-c", code, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_status_asks_where_the_peer_of_a_home_joined(tmp_path: Path) -> None:
    assert f"no peer has joined one from {tmp_path}" in complaint("status", "--home", tmp_path)
    (tmp_path / "last-bootstrap").write_text("nonsense")
    assert "nonsense" in complaint("status", "--home", tmp_path)
