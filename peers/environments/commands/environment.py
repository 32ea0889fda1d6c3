"""`swarm environment`: write an environment, check it, and look at rollouts in it."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from swarm.errors import UserError
from swarm.jobs.environment import CatalogueService, Installed, ListInstalled
from swarm.sentences import numbered
from swarm.terminal.exit import exits
from swarm.terminal.extras import require_extra
from swarm.terminal.interrupt import run_until_interrupted
from swarm.terminal.options import (
    AsJson,
    CurriculumStep,
    EnvironmentOptions,
    TaskSeed,
    Temperature,
    check_temperature,
    environment_options,
)
from swarm.terminal.output import plain, print_json
from swarm.world import client
from swarm.world.compute import LocalCompute

SERVICE = "peers.environments.trial:Catalogue"


async def installed() -> list[Installed]:
    """All environments of this machine, by name."""
    async with LocalCompute().child(SERVICE, name="environments") as child:
        return (await client(CatalogueService, child).list(ListInstalled())).environments


async def version_of(name: str) -> str:
    """The version of an environment of this machine; raises `UserError`."""
    found = {each.name: each for each in await installed()}
    if name not in found:
        raise UserError(
            f"environment {name!r} is not installed here; known environments: {', '.join(found)}"
        )
    if found[name].problem:
        raise UserError(found[name].problem)
    return found[name].version


VERIFIERS = "verifiers"

app = typer.Typer(help="Environments: what a run trains on.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="Name of an environment that is installed here.")]


@app.command("list")
@exits
def list_command(as_json: AsJson = False) -> None:
    """List the environments that are installed here, with versions and options."""

    found = run_until_interrupted(installed)
    if as_json:
        print_json({"environments": plain(found)})
        return
    width = max(len(each.name) for each in found)
    for each in found:
        kind = "several turns" if each.several_turns else "single turns"
        text = each.problem or f"version {each.version}, {kind}, {each.package or 'built in'}"
        options = f"; options: {', '.join(each.options)}" if each.options else ""
        print(f"{each.name:{width}}  {text}{options}")


@app.command("new")
@exits
def new_command(
    name: Annotated[str, typer.Argument(help="Name of the new environment, such as word-chain.")],
    folder: Annotated[
        Path | None, typer.Option(help="Folder to make; default: the name, in this folder.")
    ] = None,
) -> None:
    """Write a package with a small environment, its test and a README."""
    from peers.environments.commands.check import write_package
    from peers.environments.registry import BUILT_IN

    made = write_package(name, folder or Path(name), BUILT_IN)
    for path in made:
        print(path)
    print(
        f"install it with `pip install -e {folder or name}`, then `swarm environment check {name}`"
    )


@app.command("check")
@exits
def check_command(
    name: Name,
    option: EnvironmentOptions = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Hugging Face folder whose tokenizer renders the prompts."),
    ] = None,
    tasks: Annotated[int, typer.Option(min=1, max=10_000, help="Tasks to draw.")] = 64,
    graded: Annotated[
        int, typer.Option(min=1, max=1_000, help="Tasks to play over their answer and junk.")
    ] = 8,
    as_json: AsJson = False,
) -> int:
    """Play an environment over its own answers and over junk, in two processes.

    Exits with 1 if a run would fail in it.
    """
    from peers.environments.commands.check import check, figures
    from swarm.jobs.environment import TrialSetup

    setup = TrialSetup(
        environment=name,
        options=environment_options(option),
        model=str(model) if model is not None else "",
    )
    found = run_until_interrupted(check, setup, tasks, graded)
    shown = figures(found)
    if as_json:
        print_json({"figures": shown, "faults": found.faults, "warnings": found.warnings})
    else:
        for label, text in shown.items():
            print(numbered(f"{label:>17}  {text}"))
        for sentence in found.warnings:
            print(numbered(f"warning: {sentence}"), file=sys.stderr)
        for sentence in found.faults:
            print(numbered(f"error: {sentence}"), file=sys.stderr)
        if not found.faults:
            print("no fault was found")
    return 1 if found.faults else 0


@app.command("try")
@exits
def try_command(
    name: Name,
    policy: Annotated[Path, typer.Option(help="Hugging Face folder of a policy.")],
    option: EnvironmentOptions = None,
    tasks: Annotated[int, typer.Option(min=1, max=1_000, help="Tasks to play.")] = 3,
    samples: Annotated[int, typer.Option(min=1, max=1_000, help="Samples of each task.")] = 2,
    temperature: Temperature = 1.0,
    max_new_tokens: Annotated[
        int, typer.Option(min=0, help="Length limit of a sample; 0: as many as fit, at most 512.")
    ] = 0,
    seed: TaskSeed = 0,
    step: CurriculumStep = 0,
    as_json: AsJson = False,
) -> None:
    """Play a few rollouts with a policy, and print them with their rewards."""
    require_extra("infer", "swarm environment try")
    from peers.environments.commands.check import lines, play
    from peers.evaluation.run import Evaluation
    from swarm.look.rollouts.pager import print_lines
    from swarm.wire.manifest import EnvironmentReference

    if not policy.is_dir():
        raise UserError(f"--policy {policy} is no folder; name a Hugging Face folder")
    check_temperature(temperature)
    version = run_until_interrupted(version_of, name)
    reference = EnvironmentReference(
        name=name, version=version, options=environment_options(option)
    )
    wanted = Evaluation(
        environments=[reference],
        split="train",
        tasks=tasks,
        samples=samples,
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        stop_ids=[],
        seed=seed,
        step=step,
    )
    found = run_until_interrupted(play, policy.resolve(), wanted)
    if as_json:
        print_json({"samples": plain(found)})
        return
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print_lines(lines(wanted, found, width))


@app.command("install")
@exits
def install_command(
    library: Annotated[str, typer.Argument(help="verifiers.")],
    version: Annotated[
        str, typer.Option(help="Version of the library; 0.3.1 plays `load_environment` packages.")
    ] = "",
    package: Annotated[
        list[str] | None, typer.Option(help="A package of environments to add; may be repeated.")
    ] = None,
    home: Annotated[
        Path, typer.Option(help="Folder of keys and state of the peer that uses it.")
    ] = Path("~/.swarm"),
) -> None:
    """Make the Python of a library of environments in the home, or finish it, and add packages."""
    from peers.environments.verifiers.installed import LATEST, install, recipe_of

    if library != VERIFIERS:
        raise UserError(f"library {library!r} cannot be installed; there is: {VERIFIERS}")
    home, version = home.expanduser().absolute(), version or LATEST
    made = install(version, package or [], home, lambda line: print(line, flush=True))
    versions = ", ".join(f"{each} {found}" for each, found in made.versions.items())
    print(f"verifiers is installed in {recipe_of(version).folder(home)}: {versions}")
