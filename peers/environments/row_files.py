"""Files of rows by index: JSON lines, a JSON list, Parquet."""

import os
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, pairwise
from pathlib import Path
from typing import Any

import msgspec

from peers.environments.columns import Row, listed, read_json
from swarm.errors import UserError
from swarm.world.recent import Recent

GROUPS_KEPT = 8
"""Decoded row groups of Parquet kept in memory."""

LINE_BYTES_MAX = 16 << 20
JSON_BYTES_MAX = 256 << 20
"""A .json file is held in memory."""
NAMED_ROWS = 100
"""First rows of JSON whose names are the file's columns."""


class RowFile(ABC):
    columns: Sequence[str]
    count: int

    @abstractmethod
    def row(self, index: int, columns: Sequence[str]) -> Row:
        """These columns of a row; raises `ValueError` for a row that cannot be read."""

    def each(self, columns: Sequence[str]) -> Iterator[Row | None]:
        """These columns of every row in order; None for a row that cannot be read."""
        for index in range(self.count):
            try:
                yield self.row(index, ())
            except ValueError:
                yield None

    def _named(self) -> list[str]:
        """The names in the first rows, of which each may lack some."""
        return list({name: None for row in islice(self.each(()), NAMED_ROWS) for name in row or {}})


def open_rows(path: Path) -> RowFile:
    try:
        if path.suffix == ".parquet":
            return ParquetRows(path)
        return JsonLines(path) if path.suffix == ".jsonl" or _is_lines(path) else JsonList(path)
    except (OSError, ValueError) as error:  # pyarrow's errors are subclasses of these
        raise UserError(
            f"{path} cannot be read ({first_line(error)}); get it again, or give another file"
        ) from error


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


class JsonLines(RowFile):
    """A file with one JSON object per line; empty lines are left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._starts, self._ends = array("Q"), array("Q")
        with path.open("rb") as file:
            start = end = 0
            is_filled = False
            while part := file.readline(LINE_BYTES_MAX):  # a line may be as large as the file
                end += len(part)
                is_filled = is_filled or not part.isspace()
                if part.endswith(b"\n") or end == os.fstat(file.fileno()).st_size:
                    if is_filled:
                        self._starts.append(start)
                        self._ends.append(end)
                    start, is_filled = end, False
        self.count = len(self._starts)
        self.columns = self._named()
        if self.count and not self.columns:
            self.row(0, ())  # which says why none of them can be read

    def row(self, index: int, columns: Sequence[str]) -> Row:
        start, length = self._starts[index], self._ends[index] - self._starts[index]
        if length > LINE_BYTES_MAX:
            raise ValueError(f"it has {length:,} bytes; {LINE_BYTES_MAX:,} are the most")
        # Read, not mapped: a mapped file that is cut while a peer runs kills the peer.
        with self._path.open("rb", buffering=0) as file:
            line = os.pread(file.fileno(), length, start)
        return _object(read_json(line, "it"), columns)


class JsonList(RowFile):
    """A file with one JSON list of objects, held in memory."""

    def __init__(self, path: Path) -> None:
        if path.stat().st_size > JSON_BYTES_MAX:
            raise ValueError(f"a .json file has at most {JSON_BYTES_MAX:,} bytes; make it .jsonl")
        found = read_json(path.read_bytes(), "it")
        if not isinstance(found, list):
            raise ValueError("it is no list of objects, nor JSON lines")
        self._rows, self.count = found, len(found)
        self.columns = self._named()

    def row(self, index: int, columns: Sequence[str]) -> Row:
        return _object(self._rows[index], columns)


def _is_lines(path: Path) -> bool:
    """Whether a .json file holds JSON lines, as it often does."""
    with path.open("rb") as file:
        return file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{"


def _object(found: Any, columns: Sequence[str]) -> Row:
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")
    for name in columns:
        if name not in found:
            raise ValueError(f"it lacks {name!r}; it has: {listed(name, found)}")
    return found


class ParquetRows(RowFile):
    """A Parquet file, of which the row groups in use are decoded."""

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet

        # A file is open only while it is read: there may be more files than a process may open.
        with pyarrow.parquet.ParquetFile(path) as file:
            self._metadata = file.metadata
            self.columns: Sequence[str] = list(file.schema_arrow.names)
        self._path = path
        groups = map(self._metadata.row_group, range(self._metadata.num_row_groups))
        self._starts = [0, *accumulate(group.num_rows for group in groups)]
        self.count = self._starts[-1]
        self._groups: Recent[tuple[int, tuple[str, ...]], Any] = Recent(GROUPS_KEPT)

    def each(self, columns: Sequence[str]) -> Iterator[Row | None]:
        for group, (start, end) in enumerate(pairwise(self._starts)):
            try:
                yield from map(_plain, self._read(group, columns).to_pylist())
            except (ValueError, OSError):
                yield from [None] * (end - start)

    def row(self, index: int, columns: Sequence[str]) -> Row:
        group = bisect_right(self._starts, index) - 1
        read = self._groups.of((group, tuple(columns)), lambda: self._read(group, columns))
        (row,) = read.slice(index - self._starts[group], 1).to_pylist()
        return _plain(row, columns)

    def _read(self, group: int, columns: Sequence[str]) -> Any:
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(self._path, metadata=self._metadata) as file:
            return file.read_row_group(group, columns=list(columns) or None)


def _plain(row: Row, wanted: Sequence[str] = ()) -> Row:
    """A row of an Arrow table, with times and decimals as text, as bytes that hold text. Other
    bytes, such as pictures, are left out; in a column that is `wanted` they raise `ValueError`."""
    try:
        plain: Row = msgspec.to_builtins(
            {
                name: _decoded(value, f"{name!r}" if name in wanted else "")
                for name, value in row.items()
            },
            str_keys=True,
        )
    except TypeError as error:
        raise ValueError(str(error)) from error
    return plain


def _decoded(value: Any, wanted: str) -> Any:
    """A value whose bytes are text in UTF-8, or None; `wanted` names a column that must be text."""
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            if wanted:
                raise ValueError(f"{wanted} holds bytes that are no text in UTF-8") from error
            return None
    if isinstance(value, dict):
        return {key: _decoded(each, wanted) for key, each in value.items()}
    if isinstance(value, list):
        return [_decoded(each, wanted) for each in value]
    return value
