"""Text as token ids, made once and mapped into memory from then on.

The hash of a source's files and of the tokenizer names the file in the cache, so that restarts,
ranks and other trainings share it. An interrupted tokenization resumes at its document."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from peers.learning.data_files import UNFINISHED, DataFile, cached, fetch, make_room
from swarm.errors import DECODE_ERRORS, UserError
from swarm.world.disk import replace_file
from swarm.world.progress import report

FORMAT = "swarm-tokens-1"
SAVED_TOKENS = 1 << 24
"""Tokens after which what has been done is durable."""

Tokens: TypeAlias = NDArray[np.uint32]
Read = Callable[[Path, int], Iterator[Tokens]]
"""The pieces of a file, in its order, from a number on."""


class _Done(msgspec.Struct):
    """How far a tokenization has come durably."""

    file: int = 0
    pieces: int = 0
    """Of the file that is being read."""
    tokens: int = 0


def tokenized(files: Sequence[DataFile], tokenizer: str, read: Read) -> tuple[str, Tokens]:
    """The tokens of some files, one behind the other, and their name; raises `UserError`.

    `tokenizer` says all else that they depend on."""
    path = cached(files, f"{FORMAT} {tokenizer}", ".tokens", partial(_tokenize, files, read))
    # An empty file cannot be mapped.
    size = path.stat().st_size // 4
    return path.stem, np.memmap(path, np.uint32, "r") if size else np.zeros(0, np.uint32)


def _tokenize(files: Sequence[DataFile], read: Read, path: Path) -> None:
    unfinished = path.with_name(path.name + UNFINISHED)
    record = path.with_name(path.stem + ".json" + UNFINISHED)
    done = _Done()
    with suppress(OSError, *DECODE_ERRORS):
        found = msgspec.json.decode(record.read_bytes(), type=_Done)
        done = found if unfinished.stat().st_size >= 4 * found.tokens else done
    with unfinished.open("ab") as to, closing(fetch(files[done.file :])) as paths:
        to.truncate(4 * done.tokens)

        def save() -> None:
            make_room(4 * SAVED_TOKENS)
            to.flush()
            os.fsync(to.fileno())
            replace_file(record, msgspec.json.encode(done))

        saved = done.tokens
        for file, here in zip(files[done.file :], paths, strict=True):
            try:
                for piece in read(here, done.pieces):
                    report()
                    to.write(piece.tobytes())
                    done.tokens, done.pieces = done.tokens + len(piece), done.pieces + 1
                    if done.tokens - saved >= SAVED_TOKENS:
                        save()
                        saved = done.tokens
            except UserError as error:  # it names the copy
                raise type(error)(str(error).replace(str(here), file.address)) from error
            done.file, done.pieces = done.file + 1, 0
            save()
    record.unlink()
    unfinished.rename(path)
