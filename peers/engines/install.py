"""Making an engine's virtual environment in a peer's home.

A library of environments (`peers.environments.verifiers.installed`) is installed in the same way.

An interrupted installation continues. Packages come from pip's configured index. Swarm itself is
linked, not copied: the child runs its peer's code."""

import fcntl
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path

import msgspec

from peers.engines import installed as recipes
from swarm.errors import UserError
from swarm.world.disk import replace_file
from swarm.world.home import make_home

Say = Callable[[str], None]

LINKED = ("swarm", "peers")
"""The packages that the environment takes from this installation of Swarm."""

CHECK_SECONDS = 600.0
"""Time for the check. Loading a tiny model takes 15 s on a CPU; a GPU may compile kernels first."""


def recipe_of(name: str) -> recipes.Recipe:
    """The recipe of an engine; raises `UserError` for an unknown name."""
    if name not in recipes.RECIPES:
        known = ", ".join(sorted(recipes.RECIPES))
        raise UserError(
            f"engine {name!r} cannot be installed; there are: {known}, and native, which needs no "
            "installation"
        )
    return recipes.RECIPES[name]


def install(recipe: recipes.Recipe, home: Path, say: Say = print) -> recipes.Installed:
    """Make an engine's environment, finish it, or renew an old version's; raises `UserError`."""
    folder = recipe.folder(home)
    try:
        make_home(home)
        folder.parent.mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{folder.parent} cannot be made ({error.strerror}); choose another --home"
        ) from error
    with _sole_installer(folder):
        found = recipes.read_installed(folder)
        if found is None or found.requirements != recipe.requirements:
            _start_anew(folder, recipe, say)
            say(f"making a virtual environment in {folder}")
            _make(recipe, folder)
            found = recipes.Installed(requirements=recipe.requirements)
        if not found.complete:
            for step in recipe.steps:  # pip is quick about what is there already
                say(f"installing {' '.join(step)}")
                pip(folder, "install", *step)
            if recipe.unwanted:
                pip(folder, "uninstall", "--yes", *recipe.unwanted)
        say(f"checking that the {recipe.kind} works")
        _link(folder)  # Swarm may have moved since
        _write(folder, msgspec.structs.replace(found, complete=False))
        _check(recipe, folder, say)
        found = msgspec.structs.replace(found, complete=True, versions=_versions(recipe, folder))
        _write(folder, found)
    return found


@contextmanager
def _sole_installer(folder: Path) -> Iterator[None]:
    """Lock an environment for this installation; raises `UserError` if another one has it."""
    lock = folder.with_name(f".{folder.name}.lock")
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process installs {folder}; wait until it has ended") from None
        yield
    finally:
        os.close(descriptor)


def _start_anew(folder: Path, recipe: recipes.Recipe, say: Say) -> None:
    if folder.exists():
        say(f"{folder} is of another version, or not complete; making it anew")
        ours = (folder / "pyvenv.cfg").exists() or not any(folder.iterdir())
        if folder.is_symlink() or not ours:
            raise UserError(f"{folder} is no environment that Swarm made; move it away")
        shutil.rmtree(folder)
    free = shutil.disk_usage(folder.parent).free
    if free < recipe.disk_bytes:
        raise UserError(
            f"{recipe.kind} {recipe.name} needs {recipe.disk_bytes >> 30} GiB of disk while it is "
            f"installed, but {folder.parent} has {free >> 30} GiB free; free some, or choose "
            "another --home"
        )


def _make(recipe: recipes.Recipe, folder: Path) -> None:
    try:
        venv.create(folder, with_pip=True, symlinks=True, clear=folder.exists())
    except subprocess.CalledProcessError as error:
        raise UserError(
            f"this Python ({sys.executable}) cannot make a virtual environment with pip; install "
            "its package python3-venv, then type the same command again"
        ) from error
    _write(folder, recipes.Installed(requirements=recipe.requirements))
    _link(folder)


def _link(folder: Path) -> None:
    for name in LINKED:
        package = sys.modules[name].__file__ if name in sys.modules else None
        assert package is not None, f"{name} is a package with an __init__.py"
        link = recipes.site_packages(folder) / name
        link.unlink(missing_ok=True)
        link.symlink_to(Path(package).resolve().parent, target_is_directory=True)


def pip(folder: Path, *arguments: str) -> None:
    """Run pip, which shows its own progress; raises `UserError` when it fails."""
    command = [str(recipes.python_of(folder)), "-m", "pip", *arguments]
    quiet = ["--disable-pip-version-check", "--no-input"]
    ended = subprocess.run([*command, *quiet], stdin=subprocess.DEVNULL, check=False)
    if ended.returncode != 0:
        raise UserError(
            f"pip could not {' '.join(arguments)} (status {ended.returncode}; its own words are "
            "above); once the cause is gone, type the same command again, which continues here"
        )


def _check(recipe: recipes.Recipe, folder: Path, say: Say) -> None:
    """Run the recipe's check; raises `UserError` with its last line."""
    command = [str(recipes.python_of(folder)), *recipe.check]
    try:
        ended = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CHECK_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{recipe.name} did not finish its check within {CHECK_SECONDS:g} s on this machine"
        ) from None
    if ended.returncode != 0:
        lines = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
        said = lines[-1] if lines else f"status {ended.returncode}, without a word"
        raise UserError(
            f"{recipe.name} is installed but does not work here ({said}); repair that, then type: "
            f"{recipe.command(folder.parent.parent)}"
        )
    for line in ended.stdout.splitlines()[-1:]:  # libraries print, too
        say(line)


def _versions(recipe: recipes.Recipe, folder: Path) -> dict[str, str]:
    installed = distributions(path=[str(recipes.site_packages(folder))])
    found = {each.name.lower(): each.version for each in installed}
    names = [re.split(r"[=<>!~ \[]", each)[0].lower() for each in recipe.requirements]
    return {name: found[name] for name in names if name in found}


def _write(folder: Path, found: recipes.Installed) -> None:
    replace_file(recipes.record_of(folder), msgspec.json.format(msgspec.json.encode(found)))
