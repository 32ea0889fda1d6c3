"""The files of settings in docs/recipes are read as they would be for a run or a peer."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from swarm.roles import load_role
from swarm.run.toml import RunHashes, manifest_from_toml
from swarm.settings import load_settings
from tests.docs.pages import ROOT, code_blocks

HASHES = RunHashes(tokenizer=bytes(32), probes=[bytes(32)])
PAGES = sorted((ROOT / "docs" / "recipes").glob("*.md"))
BLOCKS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, block in enumerate(code_blocks(page.read_text(encoding="utf-8"), "toml"))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_settings_are_read(block: str, tmp_path: Path) -> None:
    path = tmp_path / "settings.toml"
    path.write_text(block, encoding="utf-8")
    tables = tomllib.loads(block)
    if "version" in tables:
        manifest = manifest_from_toml(path, HASHES)
        assert manifest.name == tables["name"]
        assert manifest.trusted_ids()
    else:
        settings = load_settings(path, {})
        for name in settings.tables:
            settings.of(name, load_role(name).Settings)  # type: ignore[attr-defined]


def test_every_recipe_is_listed() -> None:
    listed = (ROOT / "docs" / "recipes" / "README.md").read_text(encoding="utf-8")
    assert all(f"({page.name})" in listed for page in PAGES if page.name != "README.md")
    assert len(PAGES) == 8 and len(BLOCKS) >= 9
