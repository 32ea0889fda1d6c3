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

from peers.engines.sampling import hash_quads

Tokens = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]

Search = Callable[[tuple[int, int], int, int, int, int], tuple[Tokens, Words]]
"""(key, row, position, vocabulary size, limit) → tokens in ascending order, and their words."""

COMPILE_SECONDS_MAX = 60.0
"""Time given to the compiler; it needs half a second."""

SOURCE = r"""
#include <stdint.h>

enum { QUADS = 64 };  /* Philox4x32-10 of this many counters at once, in vector registers */

int64_t search(uint32_t key_0, uint32_t key_1, uint32_t row, uint32_t position, int64_t size,
               uint32_t limit, int64_t *tokens, uint32_t *words)
{
    int64_t count = 0;
    for (int64_t first = 0; first < (size + 3) / 4; first += QUADS) {
        uint32_t word[4][QUADS], x = key_0, y = key_1, low[QUADS / 8];
        for (int i = 0; i < QUADS; i++) {
            word[0][i] = (uint32_t)(first + i);
            word[1][i] = position;
            word[2][i] = row;
            word[3][i] = 0;
        }
        for (int round = 0; round < 10; round++) {
            for (int i = 0; i < QUADS; i++) {
                uint64_t p = (uint64_t)word[0][i] * 0xD2511F53u;
                uint64_t q = (uint64_t)word[2][i] * 0xCD9E8D57u;
                word[0][i] = (uint32_t)(q >> 32) ^ word[1][i] ^ x;
                word[2][i] = (uint32_t)(p >> 32) ^ word[3][i] ^ y;
                word[1][i] = (uint32_t)q;
                word[3][i] = (uint32_t)p;
            }
            x += 0x9E3779B9u;
            y += 0xBB67AE85u;
        }
        for (int part = 0; part < QUADS / 8; part++) {
            low[part] = 0;
            for (int i = 8 * part; i < 8 * part + 8; i++)
                low[part] |= (word[0][i] <= limit) | (word[1][i] <= limit)
                           | (word[2][i] <= limit) | (word[3][i] <= limit);
        }
        for (int part = 0; part < QUADS / 8; part++) {
            if (!low[part])
                continue;
            for (int i = 8 * part; i < 8 * part + 8; i++)
                for (int j = 0; j < 4; j++) {
                    int64_t token = 4 * (first + i) + j;
                    if (word[j][i] <= limit && token < size) {
                        tokens[count] = token;
                        words[count++] = word[j][i];
                    }
                }
        }
    }
    return count;
}
"""


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
