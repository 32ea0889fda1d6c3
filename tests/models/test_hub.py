"""Models by their names of the hub, with its real client library and a hub on loopback."""

from __future__ import annotations

import socket

import pytest
from huggingface_hub import constants

from peers.models.find import Model, find_model
from swarm.errors import UserError
from tests.models.conftest import FILES, NAME
from tests.models.hub_server import COMMIT, OLDER, Hub, Repository


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
