"""`swarm checkpoint`: export and fetch, with interruptions, damage and wrong arguments."""

from __future__ import annotations

import functools
import http.server
import json
import random
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import trio
from typer.testing import CliRunner, Result

from swarm import library
from swarm.commands.main import app
from swarm.events import Events
from swarm.shardcast import sources
from swarm.shardcast.manifest import build
from swarm.shardcast.mirror.fetch import fetch
from swarm.shardcast.mirror.publish import describe, export
from swarm.shardcast.store import CheckpointStore
from swarm.world.disk import LocalDisk
from swarm.world.machine import Machine


def swarm(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "sub/notes.txt").write_text("x")
    (folder / "model.safetensors").write_bytes(random.Random(0).randbytes(1_200_000))
    return folder


def same(one: Path, other: Path) -> bool:
    names = ("config.json", "sub/notes.txt", "model.safetensors")
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


class _Quiet(http.server.SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def static(folder: Path) -> Iterator[str]:
    """Python's own static web server."""
    handler = functools.partial(_Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_exported_served_fetched(model: Path, tmp_path: Path) -> None:
    mirror, back = tmp_path / "www/mirror", tmp_path / "back"
    made = swarm("export", model, "--out", mirror, "--json")
    assert made.exit_code == 0, made.stderr
    digest = json.loads(made.stdout)["manifest"]
    assert sorted(path.name for path in mirror.iterdir()) == ["blob", "checkpoint.json"]
    again = swarm("export", model, "--out", mirror, "--json")
    assert json.loads(again.stdout) == json.loads(made.stdout)
    with static(tmp_path / "www") as root:
        got = swarm("fetch", f"{root}/mirror", "--out", back, "--digest", digest, "--json")
    assert got.exit_code == 0, got.stderr
    assert json.loads(got.stdout)["run"] == "nobody/published"
    assert same(back, model) and not (tmp_path / "back.partial").exists()


def test_an_export_can_be_interrupted_and_mends_what_is_damaged(
    model: Path, tmp_path: Path
) -> None:
    out = tmp_path / "mirror"

    async def main() -> None:
        with trio.CancelScope() as scope:
            await export(model, out, progress=lambda done, total: scope.cancel())
        assert scope.cancelled_caught, "it goes on as if nobody had pressed Ctrl-C"

    trio.run(main)
    assert (out / "blob").is_dir() and not (out / "checkpoint.json").exists()
    assert swarm("export", model, "--out", out).exit_code == 0
    damaged = max((out / "blob").iterdir(), key=lambda path: path.stat().st_size)
    whole = damaged.read_bytes()
    damaged.write_bytes(bytes(len(whole)))
    assert swarm("export", model, "--out", out).exit_code == 0
    assert damaged.read_bytes() == whole


@pytest.mark.slow
def test_a_fetch_goes_on_where_it_was_and_wrong_blobs_are_not_taken(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "SOURCE_CORRUPT_SECONDS", 0.1)
    mirror, back = tmp_path / "mirror", tmp_path / "back"
    digest = json.loads(swarm("export", model, "--out", mirror, "--json").stdout)["manifest"]
    blobs = sorted(path for path in (mirror / "blob").iterdir() if path.name != digest)
    damaged = max(blobs, key=lambda path: path.stat().st_size)
    whole = damaged.read_bytes()
    damaged.write_bytes(b"?" * len(whole))
    with static(mirror) as root:
        got = swarm("fetch", root, "--out", back, "--deadline", 1.5)
        assert got.exit_code == 1 and "sent wrong bytes" in got.stderr
        assert not back.exists() and (tmp_path / "back.partial").is_dir()
        for path in blobs:  # only the damaged blob remains to be fetched
            path.unlink()
        damaged.write_bytes(whole)
        got = swarm("fetch", root, "--out", back)
        assert got.exit_code == 0, got.stderr
    assert same(back, model)


@pytest.mark.wall_clock
async def test_a_published_folder_is_a_mirror(model: Path, tmp_path: Path) -> None:
    async with library.publish(model) as address:
        held = await fetch(tmp_path / "back", mirrors=["http://127.0.0.1:1", address])
    assert held.key == (0, 0)
    assert same(tmp_path / "back", model)


def test_an_adapter_travels_with_its_base(model: Path, tmp_path: Path) -> None:
    async def publish_both() -> None:
        disk = LocalDisk(tmp_path / "peer")
        store = CheckpointStore(disk, "me/run", Events(Machine(), "me"))
        for name in ("config.json", "sub/notes.txt", "model.safetensors"):
            await disk.write(f"made/{name}", (model / name).read_bytes())
        base = await store.publish("made", 0, 0)
        await disk.write("made/adapter_model.safetensors", b"thin")
        manifest = await build(disk, "made", run="me/run", lineage=0, step=1)
        manifest = msgspec.structs.replace(manifest, base=base.reference)
        await store.publish("made", 0, 1, manifest=manifest)

    trio.run(publish_both)
    adapter, site = tmp_path / "peer/checkpoints/0-1", tmp_path / "site"
    assert swarm("export", adapter, "--out", site).exit_code == 0
    with static(site) as root:
        got = swarm("fetch", root, "--out", tmp_path / "back")
    assert got.exit_code == 0, got.stderr
    assert f"its base, policy 0 of lineage 0, is in {tmp_path / 'back/.base-policy'}" in got.stdout
    assert (tmp_path / "back/adapter_model.safetensors").read_bytes() == b"thin"
    assert same(tmp_path / "back" / (tmp_path / "back/.base").read_text(), model)

    async def fetch_from_folder() -> None:
        async with library.publish(tmp_path / "back") as mirror:
            await fetch(tmp_path / "again", mirrors=[mirror], deadline_seconds=20)

    trio.run(fetch_from_folder)
    assert same(tmp_path / "again/.base-policy", model)
    shutil.rmtree(tmp_path / "back/.base-policy")
    refused = swarm("export", tmp_path / "back", "--out", tmp_path / "other")
    assert refused.exit_code == 2 and "its base, policy 0 of lineage 0, is not on" in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["export", "{tmp}/none", "--out", "{tmp}/x"], "is no folder"),
        (["export", "{tmp}/empty", "--out", "{tmp}/x"], "/empty holds no .safetensors file"),
        (["export", "{tmp}/deep", "--out", "{tmp}/x"], "/deep/a/b is not a file; remove it"),
        (["export", "{tmp}/lacking", "--out", "{tmp}/x"], "names 'b.safetensors', which is not"),
        (["export", "{tmp}/unindexed", "--out", "{tmp}/x"], "is no index of safetensors files"),
        (["export", "{tmp}/cut", "--out", "{tmp}/x"], "config.json is not what its manifest says"),
        (["export", "{tmp}/model/sub/..", "--out", "{tmp}/model/x"], "the checkpoint's own folder"),
        (["export", "{tmp}/model", "--out", "{tmp}/file"], "/file cannot be written (Not a dir"),
        (["fetch", "http://a..b", "--out", "{tmp}/x"], "cannot be reached: label empty or too"),
        (["fetch", "http://127.0.0.1:1", "--out", "{tmp}/file/x"], "/x cannot be written (Not a"),
        (["fetch", "http://127.0.0.1:1", "--out", "{tmp}/" + 250 * "x"], "File name too long"),
        (["fetch", "http://127.0.0.1:1", "--out", "{tmp}/empty"], "Connection refused; give the"),
        (["fetch", "http://127.0.0.1:1", "--out", "."], "is the current folder or a mount point"),
        (["fetch", "", "--out", "{tmp}/x"], "give either a mirror's address"),
        (["fetch", "127.0.0.1:1", "--out", "{tmp}/x"], "is no http:// or https:// address"),
        (["fetch", "--out", "{tmp}/x"], "give either a mirror's address"),
        (["fetch", "http://127.0.0.1:1", "--out", "{tmp}/x"], "reached: Connection refused"),
        (["fetch", "http://127.0.0.1:1", "--out", "{tmp}/model"], "not an empty folder"),
        (["fetch", "gopher://x", "--out", "{tmp}/x"], "is no http:// or https://"),
        (
            ["fetch", "http://127.0.0.1:1", "--out", "{tmp}/x", "--digest", "12"],
            "is not 64 hexadecimal digits",
        ),
        (
            ["fetch", "http://127.0.0.1:1", "--out", "{tmp}/x", "--run", "a/b"],
            "--run 'a/b' goes with --bootstrap",
        ),
    ],
)
def test_wrong_arguments_are_one_sentence(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    sentence: str,
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (tmp_path / "deep/a/b").mkdir(parents=True)
    for name, index in (("lacking", '{"weight_map":{"w":"b.safetensors"}}'), ("unindexed", "[1]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.safetensors").touch()
        (tmp_path / name / "model.safetensors.index.json").write_text(index)
    for name in ("known", "cut"):
        shutil.copytree(model, tmp_path / name)
        (tmp_path / name / ".manifest").write_bytes(manifest_of(model))
    (tmp_path / "cut/config.json").write_text("{")
    result = swarm(*(argument.format(tmp=tmp_path) for argument in arguments))
    assert result.exit_code in (1, 2)
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1 and "Traceback" not in result.stderr
    assert not list(tmp_path.glob("*.partial")) and not (tmp_path / "none").exists()


def manifest_of(folder: Path) -> bytes:
    return trio.run(describe, folder)[1]


def test_a_full_disk_names_out(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert swarm("export", model, "--out", tmp_path / "mirror").exit_code == 0
    usage = shutil.disk_usage(tmp_path)
    with static(tmp_path / "mirror") as root:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
        result = swarm("fetch", root, "--out", tmp_path / "x")
    assert result.exit_code == 2 and "move --out to a larger disk" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("index", "sentence"),
    [
        (b"<html>", "describes no checkpoint"),
        (
            b'{"run":"a\\u001b[2J","lineage":0,"step":0,"manifest":"'
            + 64 * b"0"
            + b'","manifest_bytes":1,"total_bytes":1}',
            "names no run: 'a\\x1b[2J'",
        ),
        (
            b'{"run":"a/b","lineage":0,"step":0,"manifest":"zz","manifest_bytes":1,"total_bytes":1}',
            "names no manifest",
        ),
    ],
)
def test_a_mirror_that_talks_nonsense(tmp_path: Path, index: bytes, sentence: str) -> None:
    (tmp_path / "www").mkdir()
    (tmp_path / "www/checkpoint.json").write_bytes(index)
    with static(tmp_path / "www") as root:
        result = swarm("fetch", root, "--out", tmp_path / "x")
    assert result.exit_code == 2 and sentence in result.stderr
