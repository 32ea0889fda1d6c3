"""Find the tokens with much noise on a CPU: those whose hashed word is at most a limit.

Hashing all words in numpy costs more than the rest of the noise. A C compiler makes it ten times as
fast, because every word is hashed in registers. The library is compiled by the process that uses
it, for this machine, and its file is deleted once it is loaded.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from peers.engines.noise import hash_quads

Tokens = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]

Search = Callable[[tuple[int, int], int, int, int, int], tuple[Tokens, Words]]
"""(key, row, position, vocabulary size, limit) → tokens in ascending order, and their words."""

COMPILE_SECONDS_MAX = 60.0
"""Time given to the compiler; it needs half a second."""

SOURCE = Path(__file__).with_name("search.c").read_text(encoding="utf-8")


@functools.cache
def find_search() -> Search | None:
    """The search compiled for this machine; None without a compiler, or if its words are wrong."""
    try:
        search = _compile()
    except (OSError, subprocess.SubprocessError):
        return None
    given = ((0xFFFFFFFF, 0x80000001), 2**20, 2**16 + 1, 4099, 1 << 29)
    (tokens, words), (tokens_known, words_known) = search(*given), search_by_numpy(*given)
    same = np.array_equal(tokens, tokens_known) and np.array_equal(words, words_known)
    return search if same else None


def search_by_numpy(
    key: tuple[int, int], row: int, position: int, size: int, limit: int
) -> tuple[Tokens, Words]:
    """A `Search` that costs as much as noise for all tokens: what a compiled one is checked by."""
    quads = np.arange(-(-size // 4), dtype=np.uint64)
    words = np.stack(hash_quads(key, quads, np.uint64(position), np.uint64(row)), axis=-1)
    flat = words.reshape(-1)[:size]
    tokens = np.flatnonzero(flat <= np.uint64(limit))
    return tokens, flat[tokens].astype(np.uint32)


def _compile() -> Search:
    """Compile the search; raises `OSError` or `SubprocessError` where that is not possible."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise FileNotFoundError("cc")
    with tempfile.TemporaryDirectory(prefix="swarm-search-") as folder:
        source, library = Path(folder, "search.c"), Path(folder, "search.so")
        source.write_text(SOURCE, encoding="utf-8")
        command = [compiler, "-O3", "-shared", "-fPIC", "-o", str(library), str(source)]
        for options in (["-march=native"], []):
            done = subprocess.run(
                [*command, *options],
                capture_output=True,
                timeout=COMPILE_SECONDS_MAX,
                stdin=subprocess.DEVNULL,
                check=not options,
            )
            if done.returncode == 0:
                break
        function = ctypes.CDLL(str(library)).search
    words = [ctypes.c_uint32] * 4
    function.argtypes = [*words, ctypes.c_int64, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p]
    function.restype = ctypes.c_int64

    def search(
        key: tuple[int, int], row: int, position: int, size: int, limit: int
    ) -> tuple[Tokens, Words]:
        tokens = np.empty(size, dtype=np.int64)  # pages that are not written take no memory
        found = np.empty(size, dtype=np.uint32)
        count = function(*key, row, position, size, limit, tokens.ctypes.data, found.ctypes.data)
        return tokens[:count].copy(), found[:count].copy()

    return search
