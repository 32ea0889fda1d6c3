"""Roles that other packages provide."""

from __future__ import annotations

from pathlib import Path

import pytest

from swarm.errors import UserError
from swarm.roles import load_role


def test_a_role_has_a_name_that_can_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "lab_roles-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lab-roles\nVersion: 1\n")
    relay = "peers.relay:RelayRole"
    (info / "entry_points.txt").write_text(
        f"[swarm.roles]\nlab-archive = {relay}\nLab_Archive = {relay}\n"
        "absent = lab_missing:Role\nidle = pathlib:Path\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load_role("lab-archive").__name__ == "RelayRole"
    with pytest.raises(UserError, match="1 to 20 of a-z"):
        load_role("Lab_Archive")
    with pytest.raises(UserError, match=r"there are: .*lab-archive"):
        load_role("lab_archive")
    with pytest.raises(UserError, match=r"role absent of lab-roles cannot be loaded: No module"):
        load_role("absent")
    with pytest.raises(UserError, match=r"role idle of lab-roles needs .*async def run"):
        load_role("idle")
