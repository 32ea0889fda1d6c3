"""What the walls are built from: the files that a program sees, and the program that builds."""

from __future__ import annotations

import os
import site
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

INSIDE = Path(__file__).with_name("inside.py")

LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/etc/ld.so.cache")
"""Shared libraries, wherever the interpreter lives."""

NOBODY = 65534

ENVIRONMENT = {
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
    "TMPDIR": "/tmp",
    # Equal programs give equal outputs on every machine.
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONIOENCODING": "utf-8",
}


@dataclass(frozen=True)
class Root:
    """The files that a program may read."""

    interpreter: str
    shown: tuple[str, ...]
    """Folders and files, shown at their own path."""
    links: tuple[tuple[str, str], ...]
    hidden: tuple[str, ...]
    """Folders of installed packages, shown empty, so that no verdict depends on them."""


@cache
def root() -> Root:
    """The libraries and the interpreter of this machine."""
    interpreter = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    prefix = os.path.realpath(sys.base_prefix)
    links = tuple(
        (path, str(Path(path).readlink())) for path in LIBRARIES if Path(path).is_symlink()
    )
    wanted = [path for path in LIBRARIES if not Path(path).is_symlink()]
    wanted += [f"{prefix}/lib", interpreter]
    shown: list[str] = []
    for path in wanted:
        inside = any(path == seen or path.startswith(f"{seen}/") for seen in shown)
        if Path(path).exists() and not inside:
            shown.append(path)
    packages = {*site.getsitepackages([prefix]), "/usr/lib/python3/dist-packages"}
    hidden = sorted(path for path in packages if Path(path).is_dir() and _within(path, shown))
    return Root(interpreter, tuple(shown), links, tuple(hidden))


def _within(path: str, folders: list[str]) -> bool:
    return any(path.startswith(f"{folder}/") for folder in folders)


def launcher(control: int, spec: int) -> list[str]:
    """The command that builds the walls, given the two inherited file descriptors."""
    return [root().interpreter, "-I", "-S", str(INSIDE), str(control), str(spec)]
