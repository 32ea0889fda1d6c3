"""The pictures in docs/dashboard.md, of a made-up run: `python -m tests.dashboard.pictures`."""

from __future__ import annotations

import sys
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Any, cast

import trio
from msgspec.structs import replace
from PIL import Image
from PIL.Image import Dither
from starlette.responses import JSONResponse

from swarm.look.dashboard.watch import Feed, Watcher
from swarm.node.node import Node
from swarm.run.run import Run
from tests.dashboard.browser import chromium
from tests.dashboard.harness import serving
from tests.dashboard.recorded import answers, recorded
from tests.ledger.harness import ALICE, OWNER, TRAINER, manifest
from tests.network.harness import sealed_manifest

DOCS = Path(__file__).parents[2] / "docs"

PICTURES = {
    "dashboard.png": {"width": 1280, "until": "training"},
    "dashboard-dark.png": {"width": 768, "dark": True, "until": "rollouts"},
    "dashboard-narrow.png": {"width": 390, "until": "rollouts"},
}
"""Width and colours of each, and the part of the page before which it ends."""

BYTES_MAX = 300_000

COLOURS = 256
"""Of a picture's palette, which makes it a third as large."""


async def draw() -> dict[str, bytes]:
    """The pictures, by name."""
    shown = recorded(250)
    shown = replace(shown, head=replace(shown.head, rollouts="newest"))
    run = Run(sealed_manifest(OWNER, manifest([TRAINER], [ALICE])))
    page: dict[str, Any] = {
        "watcher": Watcher(cast(Node, None), run, Path(), public=True),
        "public": True,
        "_kept": [(float("inf"), JSONResponse(answers()))],
    }
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        async with serving(Feed(shown), **page) as http, chromium(Path(folder)) as browser:
            for name, wanted in PICTURES.items():
                options = cast(dict[str, Any], {**wanted})
                part = f"document.getElementById('{options.pop('until')}')"
                opened = await browser.open(str(http.base_url), **options)
                await opened.evaluate("document.getElementById('rollouts').scrollIntoView()")
                await opened.until("document.querySelector('#rollouts pre')")
                await opened.evaluate("scrollTo(0, 0)")
                top = await opened.evaluate(f"{part}.getBoundingClientRect().top")
                found[name] = await opened.picture(int(top))
    return found


def main() -> None:
    for name, picture in trio.run(draw).items():
        few = (
            Image.open(BytesIO(picture))
            .convert("RGB")
            .quantize(COLOURS, kmeans=2, dither=Dither.NONE)
        )
        few.save(DOCS / name, optimize=True)
        size = (DOCS / name).stat().st_size
        print(f"{name}: {size:,} bytes")
        if size > BYTES_MAX:
            sys.exit(f"{name} has more than {BYTES_MAX:,} bytes")


if __name__ == "__main__":
    main()
