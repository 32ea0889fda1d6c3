"""Files that a process gives up for good, by the kernel's Landlock (Linux since 5.19).

Landlock lists what stays readable, by folders. So all of the machine is listed but the closed
files: on the way to each, every neighbour by itself. What is made later in a folder on that way is
closed, too; folders that exist keep all that comes into them."""

import ctypes
import functools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from swarm.world.process import INSTALLED_VARIABLE

T = TypeVar("T")

_CREATE, _ADD, _RESTRICT = 444, 445, 446
"""Numbers of the system calls, the same on every machine that Linux has had since."""

_VERSION_FLAG = 1
_RULE_PATH_BENEATH = 1
_READ_FILE, _REFER = 1 << 2, 1 << 13
_PR_SET_NO_NEW_PRIVS = 38

SCRATCH = "scratch"
"""Folder of a home for its children's temporary files."""

CACHES = (".cache", ".triton", ".nv")
"""Folders of a user that libraries make when they need them: torch, Triton, CUDA."""

OLDEST = 2
"""Version of Landlock from which on a process under it may move files between folders."""


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("folder", ctypes.c_int32))


def reading_in_home(
    *folders: str, before_keys_close: Callable[[], None] = lambda: None
) -> Callable[[T], T]:
    """Say of a function that opens a child's service what a class has as attributes.

    `folders` are those of the home that it reads; see `swarm.world.child`."""

    def named(opens: T) -> T:
        for name, value in (("reads_in_home", folders), ("before_keys_close", before_keys_close)):
            setattr(opens, name, value)
        return opens

    return named


def version() -> int:
    """The kernel's version of Landlock; below 1 if it has none."""
    found: int = _libc().syscall(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(_VERSION_FLAG))
    return found


def close_keys(folders: Iterable[str]) -> None:
    """Make the keys in the peer's home, and in the user's, unreadable to this thread for good.

    The processes and threads that it starts cannot read them either, nor trace others. `folders`
    are those of the home that it reads and that may not exist yet. Raises `OSError`.

    Where the folder of temporary files, or the user's own, holds a home, what is made in it later
    would be closed: temporary files go into the home then, and the caches' folders are made now."""
    user = Path("~").expanduser()
    homes = [user / ".swarm"]
    installed = os.environ.get(INSTALLED_VARIABLE)
    if installed is not None:
        homes.insert(0, Path(installed).parent)
        for name in (*folders, SCRATCH):
            (homes[0] / name).mkdir(mode=0o700, parents=True, exist_ok=True)
    closed = {key.resolve() for home in homes for key in home.glob("*.key")}
    ways = {parent for key in closed for parent in key.parents}
    if installed is not None and Path(tempfile.gettempdir()).resolve() in ways:
        os.environ["TMPDIR"] = tempfile.tempdir = str(homes[0] / SCRATCH)
    if user.resolve() in ways:
        for name in CACHES:
            with suppress(OSError):
                (user / name).mkdir(exist_ok=True)
    close_files(closed)


def close_files(closed: set[Path]) -> None:
    """Make files, given by their real paths, unreadable to this thread; raises `OSError`."""
    if not closed:
        return
    if version() < OLDEST:
        raise OSError(f"the kernel has no Landlock of version {OLDEST}")
    libc = _libc()
    handled = ctypes.c_uint64(_READ_FILE | _REFER)
    rules = _checked(libc.syscall(_CREATE, ctypes.byref(handled), ctypes.c_size_t(8), 0))
    try:
        _allow(rules, "/", _REFER)
        ways = {str(parent) for each in closed for parent in each.parents}
        for path, is_folder in _others("/", ways, set(map(str, closed))):
            _allow(rules, path, _READ_FILE | _REFER if is_folder else _READ_FILE)
        one, zero = ctypes.c_ulong(1), ctypes.c_ulong(0)
        _checked(libc.prctl(_PR_SET_NO_NEW_PRIVS, one, zero, zero, zero))
        _checked(libc.syscall(_RESTRICT, rules, 0))
    finally:
        os.close(rules)


def _others(folder: str, ways: set[str], closed: set[str]) -> Iterator[tuple[str, bool]]:
    """What is to stay readable in `folder`, which holds closed files; links lead elsewhere."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.path in closed or entry.is_symlink():
                continue
            if entry.path in ways:
                yield from _others(entry.path, ways, closed)
            else:
                yield entry.path, entry.is_dir(follow_symlinks=False)


def _allow(rules: int, path: str, access: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:  # it is gone, or closed to this user anyway
        return
    try:
        rule = _PathBeneath(access, descriptor)
        _checked(_libc().syscall(_ADD, rules, _RULE_PATH_BENEATH, ctypes.byref(rule), 0))
    finally:
        os.close(descriptor)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
