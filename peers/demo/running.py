"""A demo in a terminal: live view, interruption, summary page."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import trio
from rich.console import Console

from peers.demo.play import Demo
from peers.demo.recipes import recipe_of
from peers.demo.setup import DemoOptions, check_memory, check_options
from peers.demo.summary import OUTPUT, page
from peers.demo.view import draw, print_lines
from peers.engines.demo import save_tokenizer
from peers.environments.run_probe import try_grading
from peers.models.find import find_model
from swarm.run.allowed import allow_environments
from swarm.terminal.output import STANDARD_OUTPUT


async def run_demo(options: DemoOptions) -> int:
    """Run a demo; returns the exit status: 0, or 130 after Ctrl-C.

    Raises `UserError` for wrong options and `SwarmError` if the demo cannot continue.
    """
    check_options(options)
    model = None
    if options.model is not None:
        model = find_model(options.model, "--model")
        check_memory(model.folder, options)
    console = Console(stderr=options.json_file == STANDARD_OUTPUT)
    lines = options.plain or not console.is_terminal
    summary: dict[str, Any] | None = None
    with tempfile.TemporaryDirectory(prefix="swarm-fork-") as name:
        socket_folder = Path(name)
        save_tokenizer(socket_folder)  # of the policy that is made where none is given
        recipe = recipe_of(
            options.environment,
            options.environment_options,
            model=model.folder if model else None,
            tokenizer=socket_folder,
        )
        allow_environments(each.name for each in recipe.environments)  # to the demo's peers as well
        try_grading(recipe.environments)
        folder = (options.keep or Path(tempfile.mkdtemp(prefix="swarm-demo-"))).absolute()
        demo = Demo(options, recipe, model, folder, socket_folder)
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM, signal.SIGHUP) as signals:
            try:
                async with trio.open_nursery() as nursery:

                    async def listen() -> None:
                        async for _ in signals:
                            nursery.cancel_scope.cancel()
                            return

                    nursery.start_soon(listen)
                    if lines:
                        nursery.start_soon(print_lines, demo.state, console.file)
                    else:
                        nursery.start_soon(draw, demo.state, console)
                    summary = await demo.run(nursery)
                    nursery.cancel_scope.cancel()
            except BaseException:
                print(f"the peers' output is in {folder / 'logs'}", file=sys.stderr)
                raise
    if options.keep is None:
        shutil.rmtree(folder, ignore_errors=True)
    if summary is None:
        print("stopped", file=sys.stderr)
        return 130
    output = options.keep or OUTPUT
    files = {
        "trained policy": output / "policy",
        "reward curve": output / "reward.png",
        "summary": output / "summary.json",
    }
    if options.json_file not in (None, STANDARD_OUTPUT):
        files["summary"] = options.json_file
    if options.keep is not None:
        files["peers and logs"] = options.keep
    console.print(page(summary, files))
    return 0
