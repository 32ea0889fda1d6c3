"""`docs/settings.md` and the examples of settings are what the program takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from peers.trainer.settings import TrainerSettings
from swarm.settings import load_settings
from tests.docs.pages import code_blocks, section, text
from tests.docs.settings_page import PAGE, page


def test_the_page_is_made_from_the_models() -> None:
    made = "run python -m tests.docs.settings_page"
    assert PAGE.read_text(encoding="utf-8") == page(), made


@pytest.mark.parametrize(
    "example",
    [
        code_blocks(text("docs/settings.md"), "toml")[0],
        code_blocks(section(text("docs/training.md"), "Settings"), "toml")[0],
    ],
    ids=["settings", "training"],
)
def test_the_examples_are_accepted(example: str, tmp_path: Path) -> None:
    (tmp_path / "peer.toml").write_text(example, encoding="utf-8")
    settings = load_settings(tmp_path / "peer.toml", {})
    assert settings.of("trainer", TrainerSettings).model == "base"
