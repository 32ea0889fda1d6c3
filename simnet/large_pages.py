"""Large pages for the memory of a simulation: a thousand peers are ten million small objects in two
gigabytes, and with pages of 4 KiB a tenth of the time goes to address translation. glibc asks for
pages of 2 MiB by a tunable (GNU C Library manual, "Memory Allocation Tunables")."""

import os
import platform
import sys

_ENVIRONMENT = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_GLIBC = (2, 35)
"""First version that has the tunable."""


def use_large_pages() -> None:
    """Start this program again with large pages, if this machine has them and the environment does
    not say otherwise. Call it first: the restart discards everything done before."""
    library, version = platform.libc_ver()
    if library != "glibc" or tuple(map(int, version.split(".")[:2])) < _GLIBC:
        return
    if not any(variable in os.environ for variable in _ENVIRONMENT):
        program = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, program, {**os.environ, **_ENVIRONMENT})
