from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from simnet.large_pages import use_large_pages
use_large_pages()
print(os.environ.get("GLIBC_TUNABLES"), sys.argv[1:])
"""


def run(**variables: str) -> str:
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONMALLOC", "GLIBC_TUNABLES")
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "one", "two words"],
        env={**environment, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_a_program_starts_again_once_with_its_arguments() -> None:
    assert run() == "glibc.malloc.hugetlb=1 ['one', 'two words']"


def test_what_somebody_chose_is_left_alone() -> None:
    assert run(PYTHONMALLOC="pymalloc") == "None ['one', 'two words']"
