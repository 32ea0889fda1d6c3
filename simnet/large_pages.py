"""Large pages for the memory of a simulation.

A thousand peers are some ten million small objects, spread over two gigabytes. With pages of 4 KiB
the processor spends a tenth of its time on address translation. glibc's allocator asks the kernel
for pages of 2 MiB if a tunable is set before the process starts (GNU C Library manual, "Memory
Allocation Tunables"); Python's own allocator has no such setting."""

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
