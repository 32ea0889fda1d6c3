"""Every user error prints one clear sentence and gives an exit status other than 0."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from msgspec.structs import replace

import swarm.wire.envelope
from peers.engines.installed import Installed, python_of, record_of
from peers.outer.alone.averaging import open_backend
from peers.outer.backends.installed import recipe_of
from swarm.errors import PeerError, UserError
from swarm.jobs.averaging import AveragingSetup
from swarm.node.joining import NO_WAY_IN, find_run, join_network
from swarm.node.local import open_node
from swarm.node.node import Node
from swarm.run.update import sign_manifest
from swarm.settings import PeerSettings
from swarm.terminal.exit import exit_with
from swarm.wire.envelope import ENVELOPE_VERSION, Envelope
from swarm.wire.identity import Identity, load_or_create
from swarm.wire.manifest import RunManifest
from swarm.wire.protocol import PROTOCOL_VERSION
from tests.commands.harness import NOBODY, bootstrap_peer, complaint, signed_manifest

OWNER = Identity(bytes(32))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--bootstrap", "localhost:4001"], "'localhost:4001' is not a multiaddr"),
        (["--bootstrap", "/ip4/1"], "'/ip4/1' is not a multiaddr"),
        (["--bootstrap", "/ip4/127.0.0.1/tcp/1"], "must end in /p2p/12D3KooW…"),
        (["--bootstrap", NOBODY, "--listen", "/ip4/0.0.0.0"], "'/ip4/0.0.0.0'"),
        (["--bootstrap", NOBODY, "--role", "miner"], "unknown role 'miner'; there are: bootstrap"),
        (["--role", "inference"], "no way into the network: give --bootstrap"),
        (["--bootstrap", NOBODY, "--manifest", "nowhere"], "run manifest nowhere cannot be read"),
        (["--bootstrap", NOBODY, "--config", "nowhere"], "--config nowhere cannot be read"),
    ],
)
def test_flags(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    assert sentence in complaint("peer", "--home", tmp_path / "home", *arguments)


def test_a_dashboard_of_rollouts_that_are_nowhere(tmp_path: Path) -> None:
    said = complaint("dashboard", "--bootstrap", NOBODY, "--rollouts", tmp_path)
    assert f"--rollouts {tmp_path} is no peer's home; give a validator's or trainer's" in said


def test_a_manifest_is_no_way_to_anybody_for_a_worker(tmp_path: Path) -> None:
    """Such a worker used to wait for ever, and logged that it knew no address of a trusted peer."""
    manifest = tmp_path / "run.manifest"
    manifest.write_bytes(signed_manifest(tmp_path, OWNER).raw)
    said = complaint("peer", "--role=inference", "--home", tmp_path / "h", "--manifest", manifest)
    assert said == NO_WAY_IN


@pytest.mark.parametrize("what", ["xyz", "", "12.5", "QmOfAnotherKind"])
def test_why_says_at_once_what_can_be_asked_about(what: str) -> None:
    assert "is neither the beginning of a submission's hash" in complaint("why", what)


@pytest.mark.parametrize("role", ["bootstrap", "relay", "trainer", "validator"])
@pytest.mark.wall_clock
async def test_who_is_looked_for_may_wait_for_others(role: str, tmp_path: Path) -> None:
    async with a_node(tmp_path / "home", role=[role]) as node:
        assert await join_network(node) == {}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("role = 3", "role is 3: input should be a valid list"),
        ('bulk_port = "80"', "bulk_port is '80': input should be a valid integer"),
        ("bulk_port = 70000", "bulk_port is 70000: input should be less than or equal to 65535"),
        ("colour = 1", "unknown key 'colour'; there are: [environment], [inference], "),
        ("role = [", "is not valid TOML"),
    ],
)
def test_settings_files(text: str, sentence: str, tmp_path: Path) -> None:
    config = tmp_path / "settings.toml"
    config.write_text(text)
    said = complaint("peer", "--config", config, "--bootstrap", NOBODY, "--home", tmp_path)
    assert sentence in said and str(config) in said


def _open_to_all(key: Path) -> None:
    load_or_create(key)
    key.chmod(0o644)


def _garbage(key: Path) -> None:
    key.write_text("not a key\n")
    key.chmod(0o600)


def _huge(key: Path) -> None:
    key.touch(mode=0o600)
    os.truncate(key, 2**40)


def _unreadable(key: Path) -> None:
    # Root can read files of any mode, so a folder stands for a file that cannot be read.
    key.mkdir(mode=0o700)


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (_open_to_all, "has mode 0644, so others can read it; run: chmod 600"),
        (_garbage, "does not hold a key of 64 hex digits"),
        (_huge, "does not hold a key of 64 hex digits"),
        (_unreadable, "cannot be read (Is a directory)"),
    ],
)
def test_key_files(spoil: Callable[[Path], None], sentence: str, tmp_path: Path) -> None:
    spoil(tmp_path / "identity.key")
    said = complaint("peer", "--bootstrap", NOBODY, "--home", tmp_path)
    assert sentence in said and str(tmp_path / "identity.key") in said


def test_a_manifest_of_a_terabyte_is_not_read(tmp_path: Path) -> None:
    _huge(tmp_path / "run.manifest")
    words = ("--manifest", tmp_path / "run.manifest", "--home", tmp_path / "home")
    assert "is not a valid run manifest" in complaint("peer", "--role=bootstrap", *words)


def test_a_home_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = complaint("peer", "--bootstrap", NOBODY, "--home", tmp_path / "file" / "home")
    assert "--home" in said and "choose another folder" in said


def test_a_home_is_made_private(tmp_path: Path) -> None:
    complaint("peer", "--bootstrap", "/ip4/1", "--home", tmp_path / "home")
    assert not (tmp_path / "home").exists(), "a mistake in the flags leaves nothing behind"


SELF = "/ip4/127.0.0.1/tcp/1/p2p/SELF"
SILENT = f"/ip4/127.0.0.1/tcp/PORT/p2p/{OWNER.peer_id}"
NAMELESS = f"/dns4/nowhere.invalid/tcp/4001/p2p/{OWNER.peer_id}"


@pytest.mark.parametrize(
    ("address", "reason", "advice"),
    [
        (NOBODY, "no program listens on that port", "check the port, and that the peer runs"),
        (SILENT, "no answer within 0.5 s", "check the address, that the peer runs, and that no"),
        (NAMELESS, "the name nowhere.invalid does not resolve (", "this machine's DNS"),
        (SELF, "that is this peer itself", "give the address of another peer"),
    ],
)
def test_a_bootstrap_address_that_leads_nowhere(
    address: str, reason: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if address == SILENT:
        monkeypatch.setattr("swarm.node.joining.BOOTSTRAP_DEADLINE_SECONDS", 0.5)
    home = tmp_path / "home"
    address = address.replace("SELF", load_or_create(home / "identity.key").peer_id)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = address.replace("PORT", str(silent.getsockname()[1]))
        said = complaint(
            *("peer", "--bootstrap", address, "--home", home), *("--listen", "/ip4/127.0.0.1/tcp/0")
        )
    assert said.startswith(f"no bootstrap peer can be reached: {address}: {reason}")
    assert advice in said
    assert stat.S_IMODE(home.stat().st_mode) == 0o700


def test_an_address_of_another_machine(tmp_path: Path) -> None:
    there = ("--listen", "/ip4/203.0.113.9/tcp/4001")
    said = complaint("peer", "--role", "bootstrap", "--home", tmp_path, *there)
    assert said.startswith("203.0.113.9 is no address of this machine; listen on one of its own")


def test_trouble_with_the_machine_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    trouble = OSError(errno.EROFS, "Read-only file system", "/home/x")
    assert exit_with(ExceptionGroup("", [trouble, PeerError("somebody is silent")])) == 1
    said = capsys.readouterr().err
    assert said == (
        "error: this machine refuses: Read-only file system (/home/x); somebody is silent\n"
    )
    with pytest.raises(FileNotFoundError):  # a defect of the program is not hidden
        exit_with(FileNotFoundError(errno.ENOENT, "No such file", "x"))


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = complaint(
            *("peer", "--role", "bootstrap", "--home", tmp_path),
            *("--listen", f"/ip4/127.0.0.1/tcp/{port}"),
        )
    assert str(port) in said


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A bootstrap peer that knows two runs."""
    folder = tmp_path_factory.mktemp("bootstrap")
    for name in ("first", "second"):
        (folder / name).write_bytes(signed_manifest(folder, OWNER, name).raw)
    with bootstrap_peer(folder / "home", folder / "first", folder / "second") as multiaddr:
        yield multiaddr


def test_another_peer_at_the_bootstrap_address(two_runs: str) -> None:
    address, _, theirs = two_runs.rpartition("/")
    said = complaint("status", "--bootstrap", f"{address}/{OWNER.peer_id}")
    assert f"{OWNER.peer_id}: another peer answers there, {theirs} (ask for the address" in said


def test_names_are_resolved_as_this_machine_does(two_runs: str) -> None:
    named = two_runs.replace("/ip4/127.0.0.1/", "/dns4/localhost/")
    assert "knows several runs" in complaint("run", "show", "--bootstrap", named)


@pytest.mark.parametrize("command", ["peer", "status", "run show"])
@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--run", "third"], "no run named 'third'; it knows: "),
        ([], "knows several runs; choose one with --run: "),
    ],
)
def test_no_such_run(
    command: str, flags: list[str], sentence: str, two_runs: str, tmp_path: Path
) -> None:
    more = ["--home", str(tmp_path), "--listen", "/ip4/127.0.0.1/tcp/0"]
    home = more if command == "peer" else []
    said = complaint(*command.split(), "--bootstrap", two_runs, *flags, *home)
    assert sentence in said and f"{OWNER.peer_id}/first" in said


def of_the_future(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Envelope:
    """A manifest signed in the next version of the envelope."""
    with monkeypatch.context() as patch:
        patch.setattr(swarm.wire.envelope, "ENVELOPE_VERSION", ENVELOPE_VERSION + 1)
        return signed_manifest(folder, OWNER)


def test_a_manifest_of_another_envelope_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "run.manifest"
    file.write_bytes(of_the_future(tmp_path, monkeypatch).raw)
    for command in (["peer", "--home", tmp_path / "home", "--manifest"], ["run", "show"]):
        said = complaint(*command, file)
        assert "needs another version of Swarm" in said
        assert f"(this one reads envelopes of version {ENVELOPE_VERSION})" in said


@asynccontextmanager
async def a_node(home: Path, **settings: Any) -> AsyncIterator[Node]:
    listening = PeerSettings(home=str(home), listen=["/ip4/127.0.0.1/tcp/0"], **settings)
    async with open_node(listening, events_sink=lambda event: None) as node:
        yield node


async def found(other: Node, home: Path, run: str | None = None) -> str:
    """The run that a peer finds which joins another, or why it finds none."""
    addresses = list(other.transport.addresses())
    async with a_node(home, bootstrap=addresses, run=run) as node:
        try:
            return (await find_run(node, await join_network(node))).id
        except UserError as error:
            return str(error)


@pytest.mark.wall_clock
async def test_runs_of_newer_builds_stand_beside_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that needs a newer build is named by its sentence, and hides no other run."""
    plain = signed_manifest(tmp_path, OWNER)
    future = replace(plain.expect(RunManifest), name="future", needs=PROTOCOL_VERSION + 1)
    with monkeypatch.context() as patch:
        patch.setattr("swarm.run.manifest.PROTOCOL_VERSION", PROTOCOL_VERSION + 1)
        newer = sign_manifest(OWNER, future, time.time())
    sentence = f"future needs protocol version {PROTOCOL_VERSION + 1}, and this build speaks"
    ours = tmp_path / "ours"
    with trio.fail_after(60):
        async with a_node(tmp_path / "theirs", role=["bootstrap"]) as other:
            other.manifests = {"plain": plain, "future": newer}
            assert await found(other, ours) == plain.body.run
            assert sentence in await found(other, ours, "future")
            del other.manifests["plain"]
            assert sentence in await found(other, ours)
            other.manifests = {"future": of_the_future(tmp_path, monkeypatch)}
            assert "needs another version of Swarm" in await found(other, ours)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--cheat", "everything"], "--cheat is 'everything'; give one of: wrong-weights, int8"),
        (["--environment", "chess"], "environment 'chess' is not installed here; known"),
        (["--model", "nothing-here"], "--model nothing-here is no folder; give a Hugging Face"),
        (["--cheat", "wrong-weights", "--peers", "1"], "give --peers 2 or more"),
        (["--steps", "0"], "--steps is 0; give 1 to"),
        (["--peers", "1000"], "--peers is 1000; give 1 to"),
        (["--seed", "-1"], "--seed is -1; give 0 to"),
    ],
)
def test_demo_flags(arguments: list[str], sentence: str) -> None:
    assert sentence in complaint("demo", *arguments)


NO_NAMESPACES = ["unshare", "-Ur", "sh", "-c"]
"""Runs a shell command in a user namespace of its own."""


def test_a_demo_of_programs_needs_a_sandbox(tmp_path: Path) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    if subprocess.run([*NO_NAMESPACES, "true"], capture_output=True).returncode:
        pytest.skip("this user may make no namespace")
    program = "from swarm.commands.main import main; main()"
    arguments = f"demo --plain --steps 1 --environment code --out {tmp_path / 'keep'}"
    command = f"exec {sys.executable} -c '{program}' {arguments}"
    forbid = "echo 0 > /proc/sys/user/max_user_namespaces"
    done = subprocess.run(
        [*NO_NAMESPACES, f"{forbid} && {command}"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: no sandbox works on this machine (")


def test_a_demo_does_not_mix_with_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "peers").mkdir()
    assert "holds the peers of an earlier demo" in complaint("demo", "--out", tmp_path)
    (tmp_path / "file").write_text("")
    said = complaint("demo", "--out", tmp_path / "file" / "keep")
    assert "cannot be made (Not a directory)" in said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run", "show"], "which network? give --bootstrap MULTIADDR"),
        (["status"], "which network? give --bootstrap MULTIADDR"),
        (["run", "show", "file", "--bootstrap", NOBODY], "give either FILE or --bootstrap"),
        (["run", "show", "nowhere"], "run manifest nowhere cannot be read"),
        (["status", "--bootstrap", "/ip4/1"], "'/ip4/1' is not a multiaddr"),
        (["ledger", "--bootstrap", NOBODY, "--peer", "me"], "--peer: 'me' is not"),
        (["rollouts", "show", "nowhere"], "nowhere cannot be read"),
    ],
)
def test_other_commands(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # no peer has joined a network from this home
    assert sentence in complaint(*arguments)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "give either --data FILE or --environment NAME"),
        (["--data", "x", "--environment", "a@1"], "give either --data FILE or --environment"),
        (["--environment", "sort-letters"], "sort-letters"),
    ],
)
def test_fine_tuning_flags(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    said = complaint("sft", "--model", tmp_path, "--out", tmp_path / "out", *arguments)
    assert sentence in said


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--steps", "65"], "--steps is 65; it must be a multiple of --inner-steps, 20"),
        (["--batch", "0"], "--batch is 0; it must be at least 1"),
        (["--learning-rate", "2"], "--learning-rate is 2.0; it must be above 0 and below 1"),
        (["--outer-momentum", "1"], "--outer-momentum is 1.0; it must be from 0 to below 1"),
        (["--set", "optimiser.decay_share=0"], "--set optimiser: decay_share is 0: "),
        (["--set", "optimiser.decay=1"], "--set optimiser: unknown key 'decay'"),
        (["--set", "replica.z_loss=-1"], "z_loss is -1: input should be greater than or equal"),
        (["--name", "x"], "--name is for --backend hivemind; add --backend"),
        (["--backend", "hivemind"], "backend 'hivemind' is not installed in"),
        (["--backend", "hivemind"], "type: swarm backend install hivemind"),
        (["--backend", "hivemind", "--index", "3"], "--index is 3, but --trainers is 2"),
        (["--join", "x"], "--join is for --backend hivemind; add --backend"),
        (["--key-file", "x"], "--key-file is for --backend hivemind; add --backend"),
        (["--resume"], "progress.json cannot be read"),
        ([], "exists already; choose another folder, or continue the training in it with --resume"),
    ],
)
def test_training_flags(arguments: list[str], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "progress.json").write_text("{}")
    files = ("--model", tmp_path, "--data", "x", "--out", tmp_path)
    steps = ("--steps", "60", "--inner-steps", "20")
    assert sentence in complaint("train", *files, *steps, *arguments)


@pytest.mark.parametrize(
    ("run", "join", "sentence"),
    [
        ("t", "http://x", "no address for hivemind"),
        ("t.", "/ip4", "--name is 't.'; use at most 100"),
        ("t", "/ip4/10.0.0.1/tcp/1/p2p/12D3KooW", "12D3KooW is no trainer of this training; copy"),
    ],
)
def test_addresses_of_a_backend(run: str, join: str, sentence: str, tmp_path: Path) -> None:
    recipe = recipe_of("hivemind")
    python_of(recipe.folder(tmp_path)).parent.mkdir(parents=True)
    python_of(recipe.folder(tmp_path)).touch()
    made = Installed(requirements=recipe.requirements, complete=True)
    record_of(recipe.folder(tmp_path)).write_bytes(msgspec.json.encode(made))
    with pytest.raises(UserError, match=re.escape(sentence)):
        setup = AveragingSetup(run=run, join=(join,))
        open_backend("hivemind", setup, tmp_path, tmp_path / "key", 1)


def test_backends_that_cannot_be_installed(tmp_path: Path) -> None:
    said = complaint("backend", "install", "gossip", "--home", tmp_path)
    assert "backend 'gossip' cannot be installed; there are: hivemind" in said


def test_fine_tuning_replaces_nothing(tmp_path: Path) -> None:
    said = complaint("sft", "--model", tmp_path, "--out", tmp_path, "--data", "x")
    assert f"--out {tmp_path} exists already; choose another folder" in said
    (tmp_path / "file").touch()
    said = complaint("sft", "--model", tmp_path, "--out", tmp_path / "file/x", "--data", "x")
    assert f"--out {tmp_path}/file/x cannot be written" in said
