"""`swarm demo`: a whole swarm on this machine."""

import tempfile
from pathlib import Path

import trio

from peers.models.find import FORMS
from swarm.terminal.exit import exits
from swarm.terminal.extras import require_extra
from swarm.terminal.options import (
    AsJson,
    EnvironmentOptions,
    Settings,
    environment_options,
    explained,
)


@exits
@explained(__file__, FORMS=FORMS)
def demo(
    model: str | None = None,
    environment: str = "sort-digits",
    option: EnvironmentOptions = None,
    steps: int | None = None,
    peers: int | None = None,
    seed: int = 0,
    out: Path | None = None,
    cheat: str | None = None,
    plain: bool = False,
    settings: Settings = None,
    as_json: AsJson = False,
) -> int:
    """Run a whole swarm on this machine, which learns a small task, by default to sort six digits.

    One bootstrap peer, two relays, a trainer, a validator and inference peers start as separate
    processes. Results go to ./demo-output (or --out): the trained policy as a Hugging Face
    folder, the reward curve, a summary. Ctrl-C ends everything. With --model a real model learns
    the task in a chat, by LoRA."""
    require_extra("train", "swarm demo")
    require_extra("plots", "swarm demo")
    from peers.demo.processes import PRELOAD_COMPUTE, end, start_fork_server
    from peers.demo.recipes import environments_of
    from swarm.run.allowed import allowing

    allowed = allowing(each.name for each in environments_of(environment))
    with tempfile.TemporaryDirectory(prefix="swarm-fork-") as name:
        folder = Path(name)
        # Its imports take longer than the demo's own, beside which they go on.
        compute = start_fork_server("compute-server", folder, PRELOAD_COMPUTE, allowed)
        try:
            from peers.demo.play import run_demo
            from peers.demo.setup import DemoOptions

            options = DemoOptions(
                model=model,
                environment=environment,
                environment_options=environment_options(option),
                steps=steps,
                peers=peers if peers is not None else 3 if model is None else 2,
                seed=seed,
                out=out,
                cheat=cheat,
                plain=plain,
                settings=settings or (),
                as_json=as_json,
            )
            return trio.run(run_demo, options, compute, folder)  # it handles signals itself
        finally:
            end(compute)
