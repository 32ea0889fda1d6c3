"""Engines in virtual environments of their own, under a peer's home: `engines/<name>/`.

`swarm engine install` (`peers.engines.install`) makes such an environment; the peer's children then
run under its interpreter. Imports neither torch nor anything of an engine's packages. Libraries of
environments (`peers.environments.verifiers`) are installed in the same way, in `environments/`."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from swarm.data import beside
from swarm.errors import UserError

NATIVE = "native"
VLLM = "vllm"

PREFILLS = {VLLM: NATIVE}
"""The engine that validates for a peer with the named engine, where that one does not prefill."""


@dataclass(frozen=True)
class Recipe:
    """How to make a virtual environment for an engine, or for another library."""

    name: str
    """Name of the folder; for an engine, what `swarm engine install` takes."""
    steps: tuple[tuple[str, ...], ...]
    """Requirements that pip installs, step by step: the first step pins what later ones pull in."""
    disk_bytes: int
    """Free disk that the installation needs, downloads included."""
    engine: str = ""
    """Value of the setting `engine` that uses it; empty for another library."""
    check: tuple[str, ...] = ("-m", "peers.engines.vllm.selftest")
    """Arguments of the environment's Python that prove that the engine works."""
    unwanted: tuple[str, ...] = ()
    """Distributions that a step pulls in and that break the engine."""
    kind: Literal["engine", "environment", "backend"] = "engine"
    arguments: str = ""
    """What `swarm <kind> install` takes; empty: the name."""

    @property
    def requirements(self) -> list[str]:
        return [each for step in self.steps for each in step]

    @property
    def label(self) -> str:
        """The name in sentences."""
        return f"{self.kind} {(self.engine or self.name)!r}"

    def folder(self, home: Path) -> Path:
        return home / f"{self.kind}s" / self.name

    def command(self, home: Path) -> str:
        """The command that installs it, for error messages."""
        default = home.expanduser() == Path("~/.swarm").expanduser()
        typed = f"swarm {self.kind} install {self.arguments or self.name}"
        return typed + ("" if default else f" --home {home}")


class _Data(msgspec.Struct):
    child_needs: tuple[str, ...]
    swarm_needs: tuple[str, ...]
    recipes: list[Recipe]


_DATA = beside(__file__, _Data)

CHILD_NEEDS = _DATA.child_needs
"""The packages that a child without a policy imports; the versions are those of pyproject.toml."""

SWARM_NEEDS = (*CHILD_NEEDS, *_DATA.swarm_needs)
"""The packages that Swarm's children import; the versions are those of pyproject.toml."""

RECIPES = {each.name: replace(each, steps=(*each.steps, SWARM_NEEDS)) for each in _DATA.recipes}


class Installed(msgspec.Struct, frozen=True, kw_only=True):
    """The file `swarm-engine.json` of an environment: what was done to make it."""

    requirements: list[str]
    complete: bool = False
    """Whether everything is installed and the check succeeded."""
    versions: dict[str, str] = {}
    """Installed versions by distribution, once complete."""


def python_of(folder: Path) -> Path:
    """The interpreter of an environment."""
    return folder / "bin" / "python"


def record_of(folder: Path) -> Path:
    return folder / "swarm-engine.json"


def read_installed(folder: Path) -> Installed | None:
    """What was done in an environment; None where there is none, or it cannot be read."""
    try:
        return msgspec.json.decode(record_of(folder).read_bytes(), type=Installed)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError):
        return None


def why_unusable(recipe: Recipe, home: Path) -> str | None:
    """One sentence about an environment that cannot be used; None if it can."""
    folder, command = recipe.folder(home), recipe.command(home)
    if not folder.exists():
        return f"{recipe.label} is not installed in {home}; type: {command}"
    found = read_installed(folder)
    if found is None or not found.complete:
        return f"the installation of {recipe.name} in {folder} is not complete; type: {command}"
    wanted = recipe.requirements
    if found.requirements != wanted:
        other = next((each for each in found.requirements if each not in wanted), "fewer packages")
        return (
            f"{folder} was installed with {other}, but this version of Swarm uses "
            f"{', '.join(each for each in wanted if each not in found.requirements)}; "
            f"type: {command}"
        )
    if not python_of(folder).exists():
        return f"{python_of(folder)} is missing, perhaps after a new Python; type: {command}"
    return None


def interpreter_for(engine: str, home: Path, interpreter: str, device: str = "auto") -> str | None:
    """The Python for the children of a peer with this `engine`; None: the peer's own.

    A setting `interpreter` overrules the installed environments. With both builds of an engine in
    the home, the CPU's is used on the device `cpu`. Raises `UserError` when the engine's
    environment is missing, half made, or of another version."""
    if interpreter:
        return interpreter
    recipes = [recipe for recipe in RECIPES.values() if recipe.engine == engine]
    if not recipes:
        return None  # the native engine, or one of another package
    if device == "cpu":
        recipes.reverse()
    present = [recipe for recipe in recipes if recipe.folder(home).exists()]
    problems = [why_unusable(recipe, home) for recipe in present or recipes]
    for recipe, problem in zip(present, problems, strict=False):
        if problem is None:
            return str(python_of(recipe.folder(home)))
    raise UserError(str(problems[0]))


def site_packages(folder: Path) -> Path:
    """Where an environment made by this Python keeps its packages."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return folder / "lib" / version / "site-packages"
