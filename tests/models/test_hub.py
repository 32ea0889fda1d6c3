"""Models by their names of the hub, with its real client library and a hub on loopback."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path

import pytest
import trio
from huggingface_hub import constants

from peers.engines import demo
from peers.inference.doctor import findings
from peers.models import hub as client
from peers.models.find import Model, find_model
from swarm.errors import UserError
from swarm.settings import PeerSettings
from tests.models.conftest import FILES, NAME
from tests.models.hub_server import COMMIT, OLDER, Hub, Repository, _Handler


def found(given: str = NAME) -> Model:
    return find_model(given, "--model")


def refused(given: str = NAME) -> str:
    with pytest.raises(UserError) as error:
        find_model(given, "--model")
    return str(error.value)


def test_a_name_becomes_a_folder_with_nothing_but_config_tokenizer_and_safetensors(
    hub: Hub,
) -> None:
    model = found()
    assert model.name == f"{NAME}@{COMMIT}"
    kept = {path.name: path.read_bytes() for path in model.folder.iterdir()}
    wanted = {name: FILES[name] for name in kept}
    assert kept == wanted
    assert set(kept) == {
        "config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors",
    }  # fmt: skip
    asked = len(hub.fetched("model.safetensors"))
    assert found() == model
    assert len(hub.fetched("model.safetensors")) == asked  # it is in the cache


@pytest.mark.slow
def test_the_doctor_loads_a_model_by_its_name(hub: Hub, tmp_path: Path) -> None:
    made = tmp_path / "made"
    demo.make_policy(made, seed=1)
    hub.repositories[NAME].files = {path.name: path.read_bytes() for path in made.iterdir()}
    settings = PeerSettings(home=str(tmp_path / "home"))
    told = {each.topic: each for each in trio.run(findings, settings, None, NAME)}
    assert told["model"].figures["weights_bytes"] > 0 and not told["model"].problem
    told = {each.topic: each for each in trio.run(findings, settings, None, "nobody/nothing")}
    assert told["model"].problem and "has no model of that name" in told["model"].text
    assert not told["engine"].problem, "the machine is looked at all the same"


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: Hub) -> None:
    assert found(f"{NAME}@v1").name == f"{NAME}@{OLDER}"
    assert found(f"{NAME}@{OLDER}").name == f"{NAME}@{OLDER}"
    assert "the hub has someone/small, but no such revision" in refused(f"{NAME}@v2")


def test_a_transfer_that_was_cut_goes_on_where_it_ended(hub: Hub) -> None:
    large = bytes(24 << 20)  # the library keeps what it has in parts of 10 MiB
    hub.repositories[NAME].files["model.safetensors"] = large
    hub.repositories[NAME].cut_once.add("model.safetensors")
    assert (found().folder / "model.safetensors").read_bytes() == large
    assert [each for each in hub.fetched("cdn/") if each and not each.startswith("bytes=0-")]


def test_a_file_with_another_sha256_never_counts(hub: Hub) -> None:
    hub.repositories[NAME].false.add("model.safetensors")
    assert "model.safetensors arrived with another SHA-256" in refused()
    hub.repositories[NAME].false.clear()
    assert (found().folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_a_listed_file_that_is_lost_is_no_whole_model(hub: Hub) -> None:
    hub.repositories[NAME].lost.add("model.safetensors")
    assert "cannot be fetched" in refused()
    hub.repositories[NAME].lost.clear()
    assert found().folder.is_dir()


def test_private_gated_and_unknown_names_say_what_to_do(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "has no model of that name" in refused("someone/else")
    hub.repositories[NAME].token = "hf_secret"
    assert "set HF_TOKEN if it is private" in refused()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert found().name == f"{NAME}@{COMMIT}"
    hub.repositories["someone/gated"] = Repository(dict(FILES), gated=True)
    assert "needs its owner's leave: ask for it at" in refused("someone/gated")


def test_offline_the_cache_serves_what_is_whole_and_nothing_else(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set" in refused()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    model = found()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert found() == model
    (model.folder / "model.safetensors").unlink()
    assert "not whole in the cache" in refused()


def test_a_hub_that_is_not_there_is_one_sentence(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{unused.getsockname()[1]}")
        assert "is no folder here, and cannot be fetched from http://127.0.0.1" in refused()


def test_weights_that_no_memory_holds_are_refused_before_they_are_fetched(hub: Hub) -> None:
    hub.repositories[NAME].stated_bytes["model.safetensors"] = 10**15
    assert "1000 TB of weights" in refused()
    assert hub.fetched("model.safetensors") == []
    # What a plan needs is fetched all the same.
    folder = find_model(NAME, "--model", weights=False).folder
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "tokenizer.json", "tokenizer_config.json",
    ]  # fmt: skip


def test_a_repository_of_pickles_or_without_a_tokenizer_is_refused(hub: Hub) -> None:
    del hub.repositories[NAME].files["model.safetensors"]
    assert "has no weights as safetensors (only pytorch_model.bin)" in refused()
    hub.repositories["someone/odd"] = Repository(
        {name: FILES[name] for name in ("config.json", "model.safetensors")}
    )
    assert "has no tokenizer.json" in refused("someone/odd")


@pytest.mark.parametrize("given", ["./nowhere", "/nowhere/at/all", "nowhere", "a/b/c", "a/b@"])
def test_what_is_no_name_is_never_looked_up(hub: Hub, given: str) -> None:
    assert "is no folder; give a Hugging Face folder, a .gguf file, or OWNER/NAME" in refused(given)
    assert hub.asked == []


@pytest.mark.parametrize(
    "given", ["", "a" * 500, "a" * 5000 + "/b", "~nobody-of-that-name/x", "\0"]
)
def test_what_is_no_path_either_is_one_sentence(hub: Hub, given: str) -> None:
    assert len(refused(given)) < 500
    assert hub.asked == []


@pytest.mark.parametrize(
    "file",
    [
        *("tokenizer.py", "tokenizer_evil.pkl", "tokenizer/evil.py", "chat_template.py"),
        *("tokenizer.bin", "original/model.safetensors", "original/model.safetensors.index.json"),
    ],
)
def test_names_like_those_of_a_model_are_not_fetched(hub: Hub, file: str) -> None:
    hub.repositories[NAME].files[file] = b"raise SystemExit"
    hub.repositories[NAME].files["chat_templates/tool.jinja"] = b"{{ messages }}"
    folder = found().folder
    assert not (folder / file).exists()
    assert (folder / "chat_templates/tool.jinja").exists()
    assert hub.fetched(file) == []


@pytest.mark.parametrize(
    "file", ["../../../../x.safetensors", "/x.safetensors", "..\\x.safetensors"]
)
def test_a_file_outside_the_folder_is_one_sentence(hub: Hub, tmp_path: Path, file: str) -> None:
    hub.repositories[NAME].files[file] = b"outside"
    with_tree = {path for path in tmp_path.rglob("*") if path.name.endswith("x.safetensors")}
    try:
        found()
    except UserError as error:
        assert "cannot be " in str(error)
    assert with_tree == {p for p in tmp_path.rglob("*") if p.name.endswith("x.safetensors")}


def _answer(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, status: int, body: bytes, **head: str
) -> None:
    """Let the hub say one thing to everything."""

    def answer(self: _Handler) -> None:
        self._send(
            body, {name.replace("_", "-"): text for name, text in head.items()}, status=status
        )

    monkeypatch.setattr(_Handler, "_answer", answer)


@pytest.mark.parametrize(
    ("status", "body", "head", "sentence"),
    [
        (200, b"<html>", {"Content_Type": "text/html"}, "does not answer as a hub"),
        (200, b"[]", {}, "does not answer as a hub"),
        (200, b"[" * 200_000, {}, "does not answer as a hub"),
        (200, json.dumps({"id": NAME, "siblings": "abc"}).encode(), {}, "does not answer as a hub"),
        (200, b"{}", {"Content_Encoding": "gzip"}, "compresses its answers"),
        (429, b"", {}, "is asked too often; try again in some minutes, or set HF_TOKEN"),
        (503, b"", {}, "answers with status 503; try again later"),
        (302, b"", {"Location": "file:///etc/passwd"}, "unsupported protocol 'file://'"),
        (302, b"", {"Location": "/api/models/x"}, "maximum allowed redirects"),
    ],
)
@pytest.mark.parametrize("weights", [True, False])
def test_a_hub_that_answers_something_else_is_one_sentence(
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    body: bytes,
    head: dict[str, str],
    sentence: str,
    weights: bool,
) -> None:
    _answer(hub, monkeypatch, status, body, **head)
    with pytest.raises(UserError, match=re.escape(sentence)):
        find_model(NAME, "--model", weights=weights)


@pytest.mark.parametrize("weights", [True, False])
def test_a_hub_that_never_ends_its_answer_is_left(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, weights: bool
) -> None:
    monkeypatch.setattr(client, "ANSWER_SECONDS", 0.5)

    def answer(self: _Handler) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "1000000")
        self.end_headers()
        try:
            for _ in range(100):
                self.wfile.write(b" ")
                time.sleep(0.1)
        except OSError:
            self.close_connection = True

    monkeypatch.setattr(_Handler, "_answer", answer)
    with pytest.raises(UserError, match=f"{hub.endpoint} gave no whole answer within"):
        find_model(NAME, "--model", weights=weights)


@pytest.mark.parametrize("weights", [True, False])
def test_a_hub_that_says_nothing_is_left(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, weights: bool
) -> None:
    monkeypatch.setattr(client, "SECONDS", 0.5)
    monkeypatch.setattr(_Handler, "_answer", lambda self: time.sleep(5))
    with pytest.raises(UserError, match=f"cannot be fetched from {hub.endpoint}"):
        find_model(NAME, "--model", weights=weights)


def test_an_answer_has_a_largest_size(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ANSWER_BYTES", 10)
    assert "gave no whole answer within" in refused()


def test_a_file_without_an_end_is_left(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "BYTES_MAX", 1 << 20)
    monkeypatch.setattr(client, "free_memory_bytes", lambda: 1 << 20)
    plain = _Handler._content

    def content(self: _Handler, repository: Repository, file: str) -> None:
        if self.command == "HEAD":
            plain(self, repository, file)
            return
        self.send_response(200)
        self.end_headers()
        self.close_connection = True
        try:
            for _ in range(200):
                self.wfile.write(bytes(1 << 20))
        except OSError:
            return

    monkeypatch.setattr(_Handler, "_content", content)
    assert "sent more than 2.1 MB, all that fits here" in refused()


@pytest.mark.parametrize("state", ["garbage", "folder"])
def test_a_note_of_checked_files_that_cannot_be_used_is_made_anew(hub: Hub, state: str) -> None:
    model = found()
    note = model.folder.parent.parent / "swarm-checked"
    note.unlink()
    if state == "folder":
        note.mkdir()
    else:
        note.write_bytes(b"\xff\xfe")
    assert found() == model


def test_an_endpoint_needs_a_scheme_and_keeps_its_password(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "hub.example.org")
    assert "HF_ENDPOINT is hub.example.org; it must begin with https://" in refused()
    monkeypatch.setattr(constants, "ENDPOINT", "http://me:secret@127.0.0.1:1")
    assert "secret" not in refused() and "http://127.0.0.1:1" in refused()
