"""The data of the inner steps: sequences of tokens, addressed by source and index.

The documents of a source follow one another, each with the end token, and the stream is cut into
blocks of equal length, each of which begins with the last token of the block before, so that every
token but the very first is predicted once."""

import io
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

import numpy as np
import torch

from peers.engines.config import read_config
from peers.environments import Renderer
from peers.environments.rows import Rows
from peers.learning.batch import Batch
from peers.learning.data_files import find_files
from peers.learning.examples import stop_id, tokenizer_key
from peers.learning.mixture import Place
from peers.learning.token_file import Tokens, tokenized
from swarm.errors import UserError
from swarm.jobs.outer import Inner

TEXT_COLUMN = "text"
TEXT_SUFFIXES = (".txt", ".md")
CHUNK_CHARACTERS = 1 << 20
"""Most characters tokenized at a time; a longer document is cut after a line."""


class TextBlocks:
    """Blocks of text, of each source by itself."""

    def __init__(self, inner: Inner, model: Path) -> None:
        """Read the data, and tokenize them unless that was done before; raises `UserError`."""
        if not inner.data:
            raise UserError("data is empty; name at least one file to train on")
        longest = int(read_config(model)["max_position_embeddings"])
        if inner.sequence_tokens > longest + 1:
            raise UserError(
                f"sequence_tokens is {inner.sequence_tokens}; the model takes {longest} tokens, so "
                f"{longest + 1} is the most"
            )
        self._width = inner.sequence_tokens
        reader = _Reader(model)
        sources = [[each] for each in inner.data] if inner.weights else [inner.data]
        files = [
            [file for each in source for file in find_files(each, texts=TEXT_SUFFIXES)]
            for source in sources
        ]
        found = [tokenized(each, reader.key, reader) for each in files]
        self.identity = " ".join(name for name, _ in found)
        """What the data hold: another text once a file has changed."""
        self._streams = [stream for _, stream in found]
        self.sizes = [max(0, len(each) - 1) // (self._width - 1) for each in self._streams]
        """Sequences of each source."""
        for source, stream, size in zip(sources, self._streams, self.sizes, strict=True):
            if size == 0:
                raise UserError(
                    f"data has {len(stream)} tokens in {', '.join(source)}; a sequence takes "
                    f"{self._width}: give more data or a smaller sequence_tokens"
                )

    def batch(self, places: Sequence[Place]) -> Batch:
        """The sequences, perhaps none: several ranks may share fewer."""
        count, stride = len(places), self._width - 1
        blocks = [
            self._streams[source][index * stride : index * stride + self._width]
            for source, index in places
        ]
        sampled = torch.ones(count, self._width, dtype=torch.bool)
        sampled[:, 0] = False
        return Batch(
            tokens=torch.from_numpy(
                np.concatenate([np.zeros(0, np.uint32), *blocks]).astype(np.int64)
            ),
            sampled=sampled.flatten(),
            lengths=torch.full((count,), self._width),
            completion_lengths=torch.full((count,), stride),
            temperature=torch.ones(count, dtype=torch.float64),
        )


class _Reader:
    """Tokenizes the documents of a file, each with the end token."""

    def __init__(self, model: Path) -> None:
        self._renderer, self._end = Renderer(model), stop_id(model)
        self._vocabulary = read_config(model)["vocab_size"]
        self.key = tokenizer_key(model, TEXT_COLUMN, CHUNK_CHARACTERS)

    def __call__(self, path: Path, start: int) -> Iterator[Tokens]:
        for piece in itertools.islice(_texts(path), start, None):
            tokens = [self._end] if piece is None else self._renderer.encode_completion(piece)
            found = np.array(tokens, np.uint32)
            if found.size and (outside := int(found.max())) >= self._vocabulary:
                raise UserError(
                    f"{path} has the token {outside}, but the model's vocabulary has "
                    f"{self._vocabulary} tokens; remove the special token from the text"
                )
            yield found


def _texts(path: Path) -> Iterator[str | None]:
    """The documents of a file, in pieces; None: a document's end."""
    if path.suffix in TEXT_SUFFIXES:
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                yield from _pieces(file)
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: it is not UTF-8; give a file of text") from error
        return
    rows = Rows([path], str(path))
    rows.check_columns([TEXT_COLUMN], "pre-training")
    for index in range(len(rows)):
        text = rows.row(index, [TEXT_COLUMN])[TEXT_COLUMN]
        if not isinstance(text, str):
            raise UserError(f"{path}: row {index} has the {TEXT_COLUMN} {text!r}; it must be text")
        yield from _pieces(io.StringIO(text, newline=""))


def _pieces(document: TextIO) -> Iterator[str | None]:
    """A document's text in pieces of whole lines, and its end; nothing for an empty one."""
    is_empty = True
    while lines := document.readlines(CHUNK_CHARACTERS):
        is_empty = False
        yield "".join(lines)
    if not is_empty:
        yield None
