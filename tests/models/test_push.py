"""Policies pushed to a hub, with their cards, by the hub's real client library."""

from __future__ import annotations

from pathlib import Path

import pytest

from peers.models.push import Origin, card, push
from swarm.errors import UserError
from tests.models.hub_server import COMMIT, Hub


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    folder = tmp_path / "policy"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(100))
    (folder / "trainer.key").write_bytes(b"secret")
    (folder / "modeling.py").write_text("raise SystemExit")
    return folder


def test_a_pushed_policy_is_its_files_and_a_card(
    hub: Hub, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    at = push(policy, "me/new", "# Card\n", private=False, message="First")
    assert at.endswith(f"/me/new/commit/{COMMIT}")
    assert hub.repositories["me/new"].files == {
        "README.md": b"# Card\n",
        "config.json": b"{}",
        "tokenizer.json": b"{}",
        "model.safetensors": bytes(100),
    }


def test_what_is_wrong_is_one_sentence(
    hub: Hub, policy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(name: str = "me/new") -> str:
        with pytest.raises(UserError) as error:
            push(policy, name, "", private=False, message="First")
        return str(error.value)

    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    assert "give OWNER/NAME" in refused("new")
    (policy / "config.json").write_text('{"auto_map": {}}')
    assert "names programs (auto_map)" in refused()
    (policy / "model.safetensors").unlink()
    assert "is no policy: it lacks config.json or weights" in refused()
    assert hub.asked == []


def test_without_a_token_the_sentence_says_so(hub: Hub, policy: Path) -> None:
    with pytest.raises(UserError, match="HF_TOKEN"):
        push(policy, "me/new", "", private=False, message="First")


def test_a_card_says_where_a_policy_comes_from() -> None:
    text = card(
        Origin(step=40, run="12D3/run", rewards={"sums": 0.5}, evaluated_step=39), Path("x")
    )
    assert "| Policy | after 40 steps |" in text and "| Run | `12D3/run` |" in text
    assert "| sums, held out | 0.500 after 39 steps |" in text
    assert "base_model" not in text
