"""What a sandbox runs, under which limits, and how it ended."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import PurePosixPath
from typing import Literal

from swarm.errors import UserError

PYTHON = "python"
"""As `argv[0]`: the interpreter inside the sandbox."""

SOURCE_NAME = "program.py"
"""The file that holds `Program.source`."""


SHOWN_FOLDERS = ("bin", "dev", "etc", "lib", "lib64", "opt", "proc", "sbin", "sys", "usr")
"""Folders of the root that no tree may have: programs, libraries, devices."""


@dataclass(frozen=True)
class Tree:
    """Files below the root by their absolute path: what a program finds and may change, or leaves.

    Raises `UserError` for a path in a folder that a sandbox shows or lacks."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)
    """Targets of symbolic links; they may lead anywhere."""
    made: tuple[str, ...] = ()
    """Folders, those above before those in them; others are made for what they hold."""
    modes: Mapping[str, int] = field(default_factory=dict)
    """Permissions, where they are not 644 and 755."""
    times: Mapping[str, int] = field(default_factory=dict)
    """Times of change, which have the right order but are no clock's."""

    def __post_init__(self) -> None:
        for name in (*self.files, *self.links, *self.made):
            _, *parts = PurePosixPath(name).parts or ("",)
            if (
                not (parts and name.startswith("/") and not name.startswith("//"))
                or ".." in parts
                or "\0" in name
                or parts[0] in SHOWN_FOLDERS
            ):
                raise UserError(
                    f"the path {name!r:.100} is none of a sandbox's own folders; choose one such "
                    f"as /app/file, outside of {', '.join(SHOWN_FOLDERS)}"
                )

    @property
    def folders(self) -> tuple[str, ...]:
        """The folders of the root that hold it, and /tmp."""
        names = (*self.files, *self.links, *self.made)
        return tuple(sorted({f"/{PurePosixPath(each).parts[1]}" for each in names} | {"/tmp"}))


@dataclass(frozen=True)
class Program:
    """One program: either `argv` or the `source` of a Python program.

    Raises `UserError` for a program that cannot be started as it is."""

    argv: tuple[str, ...] = ()
    """Absolute path of the program, or `PYTHON`, and its arguments."""
    source: str = ""
    stdin: bytes = b""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Contents by name; the names are relative to the working folder."""
    tree: Tree | None = None
    """What stands below the root; None: the working folder is all that a program may write."""
    folder: str = "/tmp"
    """The working folder, one of the tree's unless it is /tmp."""
    with_tools: bool = False
    """Whether the machine's programs (/usr/bin) are shown, and `python3` as one of them."""
    returns_tree: bool = False
    """Whether the outcome of a program that exits has the tree that it leaves."""
    with_pytest: bool = False
    """Whether Python finds pytest in /opt/pytest; raises `SandboxError` where it is missing."""

    def __post_init__(self) -> None:
        if bool(self.argv) == bool(self.source):
            raise UserError(f"argv is {self.argv!r:.100}; give either argv or source, not both")
        if any("\0" in argument for argument in self.argv):
            raise UserError(f"argv is {self.argv!r:.100}; remove the NUL character")
        for name in self.files:
            path = PurePosixPath(name)
            if not path.parts or path.is_absolute() or ".." in path.parts or "\0" in name:
                raise UserError(f"files: {name!r:.100} leaves the working folder; rename the file")
        if self.source and SOURCE_NAME in self.files:
            raise UserError(f"files: {SOURCE_NAME!r} is the name of the source; rename the file")

    @property
    def command(self) -> tuple[str, ...]:
        return (PYTHON, SOURCE_NAME) if self.source else self.argv

    @property
    def all_files(self) -> dict[str, bytes]:
        """The files with the source among them."""
        # A completion may hold lone surrogates; Python then refuses the program, as it should.
        source = {SOURCE_NAME: self.source.encode("utf-8", "replace")} if self.source else {}
        return {**self.files, **source}


@dataclass(frozen=True)
class Limits:
    """Bounds of one program; raises `UserError` for a limit that is not a positive number."""

    seconds: float = 10.0
    """Wall time from the start of the program. Above `cpu_seconds`, so no busy machine decides."""
    cpu_seconds: float = 4.0
    """CPU time of the program and its children that it waited for."""
    memory_bytes: int = 512 << 20
    """Address space of each process, and memory of all together where a cgroup is allowed."""
    processes: int = 16
    """Processes and threads at a time."""
    output_bytes: int = 1 << 20
    """Bytes of standard output and, separately, of standard error."""
    files_bytes: int = 16 << 20
    """Bytes in all files of the working folder together."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            whole = each.name not in ("seconds", "cpu_seconds")
            if not (isinstance(value, int if whole else (int, float)) and 0 < value < math.inf):
                kind = "a positive whole number" if whole else "a positive number"
                raise UserError(f"{each.name} is {value!r}; set {kind}")


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    `status` serves people who read a refusal. A grade needs `exited` with `code` 0."""

    status: Literal["exited", "signalled", "timeout", "memory", "output", "files"]
    """`files`: never started, as its files do not fit into a sandbox."""
    code: int
    """The exit code, or the number of the signal that ended the program."""
    stdout: bytes
    stderr: bytes
    cpu_seconds: float
    tree: Tree | None = None
    """What it left, if that was asked for; None if the program did not exit, or the bytes are more
    than `files_bytes`, as with many links to one file."""
