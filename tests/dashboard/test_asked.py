"""Rollouts, which a page asks for by itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest

from swarm.errors import PeerError
from swarm.look.dashboard.reading import (
    OUTPUT_BYTES_MAX,
    ROLLOUTS_SHOWN,
    TEXT_CHARACTERS_MAX,
    TURNS_MAX,
    newest_rollouts,
    read_rollouts,
    shown_text,
)
from swarm.look.dashboard.watch import Feed, Watcher
from swarm.node.node import Node
from swarm.run.run import Run
from tests.dashboard.harness import example, serving
from tests.ledger.harness import ALICE, OWNER, TRAINER, manifest
from tests.network.harness import sealed_manifest
from tests.rollouts.test_shown import a_header, a_submission


def test_the_newest_rollouts_are_few_of_each_worker(tmp_path: Path) -> None:
    for step in range(12):
        a_submission(tmp_path / f"{step}.parquet", a_header(step=step))
    shown = newest_rollouts(tmp_path, "", None)
    steps = [each["step"] for each in shown]
    assert steps == sorted(steps, reverse=True) and steps[0] == 11
    assert len(shown) <= ROLLOUTS_SHOWN and all(steps.count(step) <= 4 for step in steps)
    assert {each["step"] for each in newest_rollouts(tmp_path, "", 3)} == {3}
    assert [turn["kind"] for turn in shown[0]["turns"]][:2] == ["prompt", "model"]


def test_a_text_is_shown_to_its_limit_and_no_further() -> None:
    """A line of a text may be as long as the text; escapes make a hostile one no longer."""
    words = "word " * 400
    assert shown_text(words) == words
    hostile = ("\u202e" * 49 + "\n") * 200 + "\ud800\x00\x1b[2J"
    assert len(shown_text(hostile)) == TEXT_CHARACTERS_MAX
    assert shown_text("\ud800\x00\x1b[2J<script>") == "\\ud800\\x00\\x1b[2J<script>"
    longest = 4 * TEXT_CHARACTERS_MAX * TURNS_MAX * ROLLOUTS_SHOWN
    assert longest < OUTPUT_BYTES_MAX, "nobody's texts are too long for the page"


@pytest.mark.wall_clock
async def test_rollouts_are_read_in_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(PeerError, match="is no submission"):
        await read_rollouts(tmp_path, "", None)
    a_submission(tmp_path / "good.parquet")
    assert json.loads(await read_rollouts(tmp_path, "", None))[0]["turns"]


@pytest.mark.wall_clock
async def test_a_public_page_reads_rollouts_once_for_all_who_ask(tmp_path: Path) -> None:
    a_submission(tmp_path / "one.parquet", a_header(step=5))
    run = Run(sealed_manifest(OWNER, manifest([TRAINER], [ALICE])))
    watcher = Watcher(cast(Node, None), run, home=tmp_path, public=True)
    async with serving(Feed(example()), watcher=watcher, public=True) as http:
        first = await http.get("/rollouts.json")
        assert first.status_code == 200 and {each["step"] for each in first.json()} == {5}
        a_submission(tmp_path / "two.parquet", a_header(step=6))
        assert (await http.get("/rollouts.json")).content == first.content
        assert (await http.get("/rollouts.json?step=5")).status_code == 403
