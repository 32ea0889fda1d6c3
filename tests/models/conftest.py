"""A hub on loopback for tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.models.hub_server import Hub, Repository, serving

NAME = "someone/small"
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b"{}",
    "model.safetensors": bytes(range(256)) * 20,
    "pytorch_model.bin": b"pickle" * 1000,
    "modeling_small.py": b"raise SystemExit",
    "README.md": b"# Small",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one model, and an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    with serving(Hub({NAME: Repository(dict(FILES))})) as served:
        monkeypatch.setattr(constants, "ENDPOINT", served.endpoint)
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            served.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        )
        yield served
