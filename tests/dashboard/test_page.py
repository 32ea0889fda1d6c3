"""The page in a headless browser: it shows hostile text as text, and its console stays silent."""

from __future__ import annotations

import shutil
import subprocess
from functools import partial
from pathlib import Path

import pytest
import trio
from msgspec.structs import replace

from swarm.look.dashboard.watch import Feed
from tests.dashboard.harness import example, serving

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--virtual-time-budget=2000",
    "--dump-dom",
)


@pytest.mark.browser
@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
@pytest.mark.wall_clock
async def test_the_page_shows_a_run_and_hostile_text_as_text(tmp_path: Path) -> None:
    done: list[subprocess.CompletedProcess[str]] = []

    shown = example()
    head = replace(shown.head, counted_from=2)
    async with serving(Feed(replace(shown, head=head))) as http:
        command = [str(BROWSER), *FLAGS, f"--user-data-dir={tmp_path}", str(http.base_url)]
        run = partial(subprocess.run, command, capture_output=True, text=True, timeout=120)
        done.append(await trio.to_thread.run_sync(run))
    page, log = done[0].stdout, done[0].stderr
    assert '<p id="link" role="status" class="on">live</p>' in page, log
    assert "CONSOLE" not in log, log
    assert "<img" not in page and page.count("&lt;img src=x onerror=alert(1)&gt;") == 3
    assert 'complete from step <span id="counted-from">2</span> on' in page
    assert page.count('<tr tabindex="0">') == 4 and page.count("<canvas") == 5
    assert "3 of 10" in page and "The trainer waits for 8 groups of step 3" in page
    assert 'aria-sort="ascending"' in page and "<th>eu-west</th>" in page
    assert "empty <code>checkpoints</code> folder" in page
    assert "43 % · 80 % from" in page
