"""`swarm environment`: list, write, check and install environments."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import typer

from peers.models.find import FORMS, find_model
from swarm.errors import UserError
from swarm.sentences import numbered
from swarm.terminal.exit import exits
from swarm.terminal.interrupt import run_until_interrupted
from swarm.terminal.options import AsJson, EnvironmentOptions, Home, environment_options, explained
from swarm.terminal.output import check_writable, print_json

app = typer.Typer(help="Environments: what a run trains on.", no_args_is_help=True)


@app.command("list")
@exits
def list_command(as_json: AsJson = False) -> None:
    """List the environments that are installed here, with versions and options."""
    from peers.environments.interface import Episodes
    from peers.environments.registry import class_of, installed

    found: list[dict[str, Any]] = []
    for name, entry in sorted(installed().items()):
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else ""
        row: dict[str, Any] = {"name": name, "package": package, "problem": ""}
        found.append(row)
        try:
            made = class_of(name)
        except UserError as error:
            row["problem"] = str(error)
            continue
        row["version"] = made.version
        row["several_turns"] = issubclass(made, Episodes)
        row["options"] = list(made.Options.__struct_fields__) if made.Options is not None else []
    if as_json:
        print_json({"environments": found})
        return
    width = max(len(row["name"]) for row in found)
    for row in found:
        text = row["problem"]
        if not text:
            kind = "several turns" if row["several_turns"] else "single turns"
            text = f"version {row['version']}, {kind}, {row['package'] or 'built in'}"
            text += f"; options: {', '.join(row['options'])}" if row["options"] else ""
        print(f"{row['name']:{width}}  {text}")


@app.command("new")
@exits
@explained(__file__)
def new_command(name: str, out: Path | None = None, terminal: bool = False) -> None:
    """Write a package with a small environment, its test and a README."""
    from peers.environments.commands.check import write_package
    from peers.environments.registry import BUILT_IN

    made = write_package(name, out or Path(name), BUILT_IN, terminal)
    for path in made:
        print(path)
    print(f"install it with `pip install -e {out or name}`, then `swarm environment check {name}`")


@app.command("check")
@exits
@explained(__file__, FORMS=FORMS)
def check_command(
    name: str,
    option: EnvironmentOptions = None,
    model: str | None = None,
    limit: int = 64,
    graded: int = 8,
    as_json: AsJson = False,
) -> int:
    """Play an environment over its own answers and over junk, in two processes.

    Exits with 1 if a run would fail in it."""
    from peers.environments.commands.check import check, figures
    from swarm.jobs.environment import TrialSetup

    name, _, version = name.partition("@")
    setup = TrialSetup(
        environment=name,
        options=environment_options(option),
        model="" if model is None else str(find_model(model, "--model", weights=False).folder),
    )
    found = run_until_interrupted(
        check, setup, limit, graded, waiting="playing tasks in two processes"
    )
    if version and found.version not in ("?", version):
        found.faults.append(
            f"version {found.version!r} is installed, not {version!r}; install that"
        )
    shown = figures(name, found)
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


@app.command("survey")
@exits
@explained(__file__)
def survey_command(
    packages: list[str] | None = None,
    list_file: Path | None = None,
    out: Path = Path("survey.jsonl"),
    deadline: float = 180,
    mib: int = 4096,
    home: Home = Path("~/.swarm"),
    as_json: AsJson = False,
) -> None:
    """Install packages of verifiers, one after another, and play and grade a task of each.

    Interrupt it at will: the same command goes on where it was. It runs what strangers wrote, so
    let a user do it who has nothing to lose."""
    from peers.environments.verifiers.survey import LISTED, Limits, listed, survey

    check_writable("--out", out, (".jsonl",))
    chosen = list(packages or ()) or listed(list_file or LISTED)
    found = []
    for each in survey(chosen, home.expanduser().absolute(), out, Limits(deadline, mib)):
        found.append(each)
        print(numbered(each.line), file=sys.stderr, flush=True)
    if as_json:
        print_json({"packages": [msgspec.to_builtins(each) for each in found]})


@app.command("install")
@exits
@explained(__file__)
def install_command(
    library: str, package: list[str] | None = None, home: Home = Path("~/.swarm")
) -> None:
    """Make the Python of a library of environments in the home, or finish it, and add packages."""
    from peers.environments.verifiers.installed import install, recipe_of

    name, _, version = library.partition("@")
    home, recipe = home.expanduser().absolute(), recipe_of(version, name)
    made = install(recipe, package or [], home, lambda line: print(line, flush=True))
    versions = ", ".join(f"{each} {found}" for each, found in made.versions.items())
    print(f"{name} is installed in {recipe.folder(home)}: {versions}")
