"""Homes of another format than this build's are refused, and stay as they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from swarm.errors import UserError
from swarm.world.home import FORMAT_FILE, HOME_FORMAT, check_format, open_format


def test_a_new_home_has_the_present_format(tmp_path: Path) -> None:
    check_format(tmp_path / "nowhere")
    open_format(tmp_path)
    assert json.loads((tmp_path / FORMAT_FILE).read_bytes())["format"] == HOME_FORMAT
    open_format(tmp_path)


def test_a_home_of_another_format_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "peer.sqlite").write_bytes(b"of format 1, which wrote no format")
    with pytest.raises(UserError, match=rf"has format 1, and this build.*{HOME_FORMAT}"):
        open_format(tmp_path)
    (tmp_path / FORMAT_FILE).write_text(json.dumps({"format": HOME_FORMAT + 1, "more": []}))
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match=rf"has format {HOME_FORMAT + 1}, and this build"):
        open_format(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"format": 0}', '{"format": "2"}', "\x00"])
def test_a_broken_format_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / FORMAT_FILE).write_text(text)
    with pytest.raises(UserError, match="restore the home from a copy"):
        open_format(tmp_path)
