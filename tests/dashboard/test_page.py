"""The page in a headless browser: every width and colour scheme, hostile text, keys and names."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from starlette.responses import JSONResponse

from swarm.look.dashboard.history import STEPS_KEPT
from swarm.look.dashboard.snapshot import Snapshot
from swarm.look.dashboard.watch import Feed, Watcher
from swarm.node.node import Node
from swarm.run.run import Run
from tests.dashboard.browser import Page, chromium, needs_browser
from tests.dashboard.harness import HOSTILE, example, serving
from tests.dashboard.recorded import of_several_trainers, recorded
from tests.ledger.harness import ALICE, OWNER, TRAINER, manifest
from tests.network.harness import sealed_manifest

pytestmark = [pytest.mark.browser, pytest.mark.wall_clock, needs_browser]

WIDTHS = (1280, 768, 390)

RUNS = {
    "no step": lambda: recorded(0),
    "one step": lambda: recorded(1),
    "60 steps": lambda: recorded(60),
    "10,000 steps": lambda: recorded(10_000),
    "mixture": lambda: recorded(120, ["sort-digits", "tools", "code"]),
    "rounds": lambda: of_several_trainers(60),
    "hostile": lambda: hostile(),
}


def hostile() -> Snapshot:
    """A run whose every text is an attack, and as long as a text may get, or far longer."""
    shown = recorded(60)
    words = HOSTILE + "<script>alert(1)</script>" + "W" * 600
    head = msgspec.structs.replace(
        shown.head,
        run="owner/" + words,
        trainer="x" * (1 << 20),
        problems=[words, "y" * (1 << 20)],
        environments=[words],
    )
    peers = {
        id: msgspec.structs.replace(
            row, roles=["w" * 40] * 8, region="w" * 24, doing=words, idle=words, reached=words
        )
        for id, row in shown.peers.items()
    }
    refusals = [
        msgspec.structs.replace(each, check=words[:40], detail=words, worker=words[:64])
        for each in shown.refusals
    ]
    return msgspec.structs.replace(shown, head=head, peers=peers, refusals=refusals)


LOOKS = Path(__file__).with_name("looks.js").read_text("utf-8")
"""Functions of the page's own that find what is wrong with its looks."""


async def looks(page: Page, call: str) -> Any:
    return await page.evaluate(f"(() => {{ {LOOKS} return {call}; }})()")


async def opened(tmp_path: Path, snapshot: Snapshot, call: str, **options: Any) -> Any:
    """The value of an expression in the page of a run; its console must be silent."""
    async with serving(Feed(snapshot)) as http, chromium(tmp_path) as browser:
        page = await browser.open(str(http.base_url), **options)
        found = await looks(page, call)
        assert not page.console
        return found


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
async def test_nothing_is_cut_wraps_or_is_faint(width: int, dark: bool, tmp_path: Path) -> None:
    async with chromium(tmp_path) as browser:
        for name, make in RUNS.items():
            async with serving(Feed(make())) as http:
                page = await browser.open(str(http.base_url), width=width, dark=dark)
                for _ in range(2):
                    assert await looks(page, "cut()") == [], name
                    assert await looks(page, "faint()") == [], name
                    await looks(page, "open()")
                assert not page.console, name


async def test_the_page_shows_a_run_and_hostile_text_as_text(tmp_path: Path) -> None:
    shown = example()
    head = msgspec.structs.replace(shown.head, counted_from=2)
    shown = msgspec.structs.replace(shown, head=head)
    page = await opened(tmp_path, shown, "document.body.outerHTML")
    assert "<img" not in page and page.count("&lt;img src=x onerror=alert(1)&gt;") == 4
    assert 'complete from step <span id="counted-from">2</span> on' in page
    assert page.count('class="open"') == 4
    assert "3 of 10" in page and "The trainer waits for 8 groups of step 3" in page
    assert 'aria-sort="ascending"' in page and ">eu-west</th>" in page
    assert "empty <code>checkpoints</code> folder" in page
    assert "43 % · 80 % from" in page


ANSWERS = [
    {
        **{
            "step": 1,
            "policy": 1,
            "worker": "w" * 52,
            "group": 0,
            "sample": 0,
            "environment": text,
        },
        **{"reward": 1.0, "advantage": -0.5, "fate": text, "verdict": "accepted", "detail": text},
        "parts": {text: 0.5},
        "turns": [{"kind": "prompt", "text": text}, {"kind": "model", "text": text}],
    }
    for text in (HOSTILE + "<script>alert(1)</script>", "W" * (1 << 20), "\n" * 4000, "")
]


@pytest.mark.parametrize("width", WIDTHS)
async def test_answers_come_by_themselves_and_are_text(width: int, tmp_path: Path) -> None:
    shown = recorded(60)
    shown = msgspec.structs.replace(
        shown, head=msgspec.structs.replace(shown.head, rollouts="newest")
    )
    run = Run(sealed_manifest(OWNER, manifest([TRAINER], [ALICE])))
    kept = [(math.inf, JSONResponse(ANSWERS))]
    page: dict[str, Any] = {
        "watcher": Watcher(cast(Node, None), run, tmp_path),
        "public": True,
        "_kept": kept,
    }
    async with serving(Feed(shown), **page) as http, chromium(tmp_path) as browser:
        opened = await browser.open(str(http.base_url), width=width)
        assert await opened.evaluate("document.querySelectorAll('#rollouts pre').length") == 0
        await opened.evaluate("document.getElementById('rollouts').scrollIntoView()")
        await opened.until("document.querySelectorAll('#rollouts pre').length === 8")
        page_text = await opened.evaluate("document.getElementById('rollouts').outerHTML")
        assert "<script" not in page_text and "<img" not in page_text
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page_text
        assert await looks(opened, "cut()") == [] and await looks(opened, "faint()") == []
        assert 'role="group" aria-label="answer"' in page_text
        assert not opened.console


async def test_peers_and_refusals_come_before_the_figures_of_training(tmp_path: Path) -> None:
    found = await opened(tmp_path, recorded(250), "parts()")
    assert found[:3] == ["", "peers-part", "refusals-part"] and "training" in found[3:]
    nothing = "!document.getElementById('no-steps').hidden"
    assert await opened(tmp_path, recorded(0), nothing)


@pytest.mark.parametrize("width", WIDTHS)
async def test_bars_of_many_steps_have_gaps(width: int, tmp_path: Path) -> None:
    async with chromium(tmp_path) as browser:
        for steps in (1, 60, 250, STEPS_KEPT):
            async with serving(Feed(recorded(steps))) as http:
                page = await browser.open(str(http.base_url), width=width)
                found = await looks(page, "bars()")
                assert found["share"] < 0.85, (steps, found)
                assert found["bars"] >= min(steps, found["width"] // 20), (steps, found)


FOCUS = "document.activeElement.getAttribute('aria-label') ?? document.activeElement.textContent"


async def until_focus(page: Page, words: str) -> str:
    """Press Tab until the focus is on what has these words in its name."""
    for _ in range(80):
        await page.press("Tab")
        found = await page.evaluate(FOCUS)
        if words in found:
            return str(found)
    raise AssertionError(f"Tab never reaches {words}")


async def test_keys_do_all_that_a_mouse_does(tmp_path: Path) -> None:
    async with serving(Feed(recorded(60))) as http, chromium(tmp_path) as browser:
        page = await browser.open(str(http.base_url))
        assert "step 59" in await until_focus(page, "reward: step")
        for key, words in (("ArrowLeft", "step 58"), ("Home", "step 0"), ("End", "step 59")):
            await page.press(key)
            assert words in await page.evaluate(FOCUS)
            assert words in await page.evaluate("document.getElementById('said').textContent")
        line = "document.activeElement.getAttribute('aria-pressed')"
        await until_focus(page, "batch")
        assert await page.evaluate(line) == "true"
        await page.press("Enter")
        assert await page.evaluate(line) == "false"
        await until_focus(page, "role")
        await page.press("Enter")
        assert await page.evaluate("document.activeElement.parentElement.ariaSort") == "ascending"
        await until_focus(page, "inference")
        for key, expanded in (("Enter", "true"), ("Escape", "false"), ("Enter", "true")):
            await page.press(key)
            assert await page.evaluate("document.activeElement.ariaExpanded") == expanded
        assert await page.evaluate(
            "document.querySelector('.detail').innerText.includes('swarm ledger')"
        )
        await page.press("/")
        assert await page.evaluate("document.activeElement.id") == "find"
        assert not page.console


async def test_a_new_state_changes_figures_and_nothing_that_a_reader_chose(tmp_path: Path) -> None:
    feed = Feed(recorded(63))
    async with serving(feed) as http, chromium(tmp_path) as browser:
        page = await browser.open(str(http.base_url))
        await until_focus(page, "reward: step")
        await until_focus(page, "batch")
        await page.press("Enter")
        peer = await until_focus(page, "inference")
        await page.press("Enter")
        for steps in (64, 75):  # from 64 steps on lines are means
            feed.publish(recorded(steps))
            await page.until(f"document.title.startsWith('{steps} ')")
            assert await page.evaluate(FOCUS) == peer
            assert await page.evaluate("document.activeElement.ariaExpanded") == "true"
            hidden = "document.querySelectorAll('[aria-pressed=false]').length"
            assert await page.evaluate(hidden) == 1
            told = await looks(page, "[chart('reward').caption, chart('verdicts').caption]")
            assert f"step {steps - 1}," in told[0] and f"–{steps - 1 + steps % 2}," in told[1], told
            assert await looks(page, "cut()") == []
        assert not page.console


async def test_a_zoom_is_that_of_all_charts_and_bars_stand_for_fewer_steps(tmp_path: Path) -> None:
    async with serving(Feed(recorded(250))) as http, chromium(tmp_path) as browser:
        page = await browser.open(str(http.base_url))
        assert "steps 245–249" in (await looks(page, 'chart("verdicts")'))["caption"]
        found = await looks(page, 'chart("reward")')
        middle = found["top"] + found["height"] / 2
        at = [found["left"] + share * found["width"] for share in (0.2, 0.4)]
        await page.drag((at[0], middle), (at[1], middle))
        # Of steps 50 to 99 the mouse, still at 40 %, points at 69; each step has a bar of its own.
        near = (await looks(page, 'chart("verdicts")'))["caption"]
        step = re.search(r"step (\d+),", near)
        assert step and 66 <= int(step[1]) <= 73, near
        await until_focus(page, "reward: step")
        await page.press("Escape")
        assert "steps 245–249" in (await looks(page, 'chart("verdicts")'))["caption"]
        assert not page.console


NAMED = {"button", "link", "textbox", "searchbox", "spinbutton", "table", "figure", "region"}
NAMED |= {"heading", "columnheader", "image", "navigation", "group"}


@pytest.mark.parametrize("width", WIDTHS)
async def test_a_screen_reader_finds_names_and_tables(width: int, tmp_path: Path) -> None:
    async with serving(Feed(recorded(60))) as http, chromium(tmp_path) as browser:
        page = await browser.open(str(http.base_url), width=width)
        found = await page.names()
    assert [each for each in found if each[0] in NAMED and not each[1].strip()] == []
    roles = [role for role, _ in found]
    assert roles.count("figure") >= 8 and roles.count("table") == 3
    # Cards keep the rows and cells of their table.
    assert roles.count("cell") > 100 and roles.count("row") > 15
    headings = [name for role, name in found if role == "heading"]
    assert headings[:3] == ["arithmetic-1b", "Peers", "Refused and quarantined"]
    assert any("refused" in name and "accepted" in name for role, name in found if role == "figure")
