"""The data of the inner steps: sequences of tokens, addressed by index.

Documents follow one another, each with the end token, and the stream is cut into blocks of equal
length, each of which begins with the last token of the block before, so that every token but the
very first is predicted once.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from peers.engines.config import read_config
from peers.environments import Renderer
from peers.environments.rows import SUFFIXES, Rows, located
from peers.learning.batch import Batch
from peers.learning.examples import stop_id
from swarm.errors import UserError
from swarm.jobs.outer import Inner
from swarm.world.progress import report

TEXT_COLUMN = "text"
TEXT_SUFFIXES = (".txt", ".md")
CHUNK_CHARACTERS = 1 << 20
"""Most characters tokenized at a time; a longer document is cut after a line."""


_NONE = torch.zeros(0, dtype=torch.int64)
NO_SEQUENCES = Batch(_NONE, _NONE.bool(), _NONE, _NONE, _NONE.float(), _NONE.double())


class TextBlocks:
    """Blocks of text, in a temporary file that is mapped into memory."""

    def __init__(self, inner: Inner, model: Path) -> None:
        """Read and tokenize the data; raises `UserError`."""
        if not inner.data:
            raise UserError("data is empty; name at least one file to train on")
        longest = int(read_config(model)["max_position_embeddings"])
        if inner.sequence_tokens > longest + 1:
            raise UserError(
                f"sequence_tokens is {inner.sequence_tokens}; the model takes {longest} tokens, so "
                f"{longest + 1} is the most"
            )
        self._width = inner.sequence_tokens
        self._stream = _tokenize(inner.data, model)
        if len(self) == 0:
            raise UserError(
                f"data has {len(self._stream)} tokens; a sequence takes {self._width}: give more "
                "data or a smaller sequence_tokens"
            )

    def __len__(self) -> int:
        return max(0, len(self._stream) - 1) // (self._width - 1)

    def batch(self, indices: Sequence[int]) -> Batch:
        """The sequences, perhaps none: several ranks may share fewer."""
        if not indices:
            return NO_SEQUENCES
        count, stride = len(indices), self._width - 1
        blocks = [self._stream[index * stride : index * stride + self._width] for index in indices]
        sampled = torch.ones(count, self._width, dtype=torch.bool)
        sampled[:, 0] = False
        return Batch(
            tokens=torch.from_numpy(np.concatenate(blocks).astype(np.int64)),
            sampled=sampled.flatten(),
            lengths=torch.full((count,), self._width),
            completion_lengths=torch.full((count,), stride),
            advantage=torch.zeros(count),
            temperature=torch.ones(count, dtype=torch.float64),
        )


def _tokenize(data: Sequence[str], model: Path) -> np.memmap[tuple[int], np.dtype[np.uint32]]:
    """The token stream of all documents of these files, in their order."""
    renderer, end = Renderer(model), stop_id(model)
    vocabulary = read_config(model)["vocab_size"]
    with tempfile.TemporaryFile(prefix="swarm-tokens-") as file:
        for path in data:
            for piece, is_last in _texts(path):
                report()
                tokens = renderer.encode_completion(piece)
                outside = [token for token in tokens if token >= vocabulary]
                if outside:
                    raise UserError(
                        f"{path} has the token {outside[0]}, but the model's vocabulary has "
                        f"{vocabulary} tokens; remove the special token from the text"
                    )
                file.write(np.array([*tokens, end] if is_last else tokens, np.uint32).tobytes())
        size = file.tell()
        if not size:
            raise UserError(f"data has no text in {', '.join(data)}; give files with text")
        file.flush()
        # The mapping keeps the file's space after its name and descriptor are gone.
        return np.memmap(file, np.uint32, "r", shape=(size // 4,))


def _texts(path: str) -> Iterator[tuple[str, bool]]:
    """The documents of a file, in pieces, each with whether it is the document's last."""
    if Path(path).suffix in TEXT_SUFFIXES:
        yield from _pieces(_read_text(located(path)))
        return
    if Path(path).suffix not in SUFFIXES and not Path(path).is_dir():
        wanted = ", ".join((*TEXT_SUFFIXES, *SUFFIXES))
        raise UserError(f"data names {path}, which is no {wanted} file; convert it to one of them")
    rows = Rows.at(path)
    rows.check_columns([TEXT_COLUMN], "pre-training")
    for index in range(len(rows)):
        text = rows.row(index, [TEXT_COLUMN])[TEXT_COLUMN]
        if not isinstance(text, str):
            raise UserError(f"{path}: row {index} has the {TEXT_COLUMN} {text!r}; it must be text")
        yield from _pieces(iter(text.splitlines(keepends=True)))


def _read_text(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            while lines := file.readlines(CHUNK_CHARACTERS):
                yield from lines
    except (OSError, UnicodeDecodeError) as error:
        reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else "it is not UTF-8"
        raise UserError(f"{path} cannot be read ({reason}); give a file of text") from error


def _pieces(lines: Iterator[str]) -> Iterator[tuple[str, bool]]:
    """A document's text in pieces of whole lines."""
    kept: list[str] = []
    size = 0
    for line in lines:
        if kept and size + len(line) > CHUNK_CHARACTERS:
            yield "".join(kept), False
            kept, size = [], 0
        kept.append(line)
        size += len(line)
    if kept:
        yield "".join(kept), True
