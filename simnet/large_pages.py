"""Large pages for the memory of a simulation.

A thousand peers are some ten million small objects, all over two gigabytes. With pages of 4 KiB the
processor spends a tenth of its time on finding out where they are. glibc's allocator asks the
kernel for pages of 2 MiB if it is told so before a process starts (GNU C Library manual, "Memory
Allocation Tunables"); Python's own allocator cannot be told.
"""

from __future__ import annotations

import os
import platform
import sys

_ENVIRONMENT = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_GLIBC = (2, 35)
"""The first that knows the tunable."""


def use_large_pages() -> None:
    """Start this program again with large pages, if this machine has them and nobody has chosen
    otherwise. To be called first of all: nothing that was done before remains."""
    library, version = platform.libc_ver()
    if library != "glibc" or tuple(map(int, version.split(".")[:2])) < _GLIBC:
        return
    if not any(variable in os.environ for variable in _ENVIRONMENT):
        program = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, program, {**os.environ, **_ENVIRONMENT})
