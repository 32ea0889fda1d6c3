"""Rows of a data set on this machine, read by index: JSON lines, Parquet, or a Hugging Face folder.

No file is held in memory: JSON lines are mapped, and of Parquet the row groups in use are decoded.
pyarrow is imported when a file needs it.
"""

from __future__ import annotations

import json
import mmap
import os
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import msgspec
from blake3 import blake3

from swarm.errors import UserError
from swarm.world.recent import Recent

SUFFIXES = (".parquet", ".jsonl")
FOLDERS_VARIABLE = "SWARM_DATASETS"
"""Environment variable: folders that hold data sets, separated as in PATH."""

FILES_MAX = 10_000
GROUPS_KEPT = 8
"""Decoded row groups of Parquet kept in memory."""

LINE_BYTES_MAX = 16 << 20

Row = dict[str, Any]
"""A row by column; JSON values only."""


class RowFile(Protocol):
    """One file of rows."""

    columns: Sequence[str]
    count: int

    def row(self, index: int, columns: Sequence[str]) -> Row:
        """These columns of a row; raises `ValueError` for a row that cannot be read."""
        ...


class Rows:
    """The rows of a data set, in the order of its files."""

    def __init__(self, files: Sequence[Path], where: str) -> None:
        """Open the files; `where` names the data set in errors. Raises `UserError`."""
        self.files, self.where = tuple(files), where
        self._opened = [_open(path) for path in files]
        self._starts = [0, *accumulate(each.count for each in self._opened)]
        if not len(self):
            raise UserError(f"{where} has no rows; give a data set with at least one")

    @classmethod
    def at(cls, path: str, split: str | None = None) -> Rows:
        """Open the file or folder `path`, or one of that name in `FOLDERS_VARIABLE`.

        Of a folder with several splits, `split` (default: train) is read. Raises `UserError`.
        """
        found = located(path)
        return cls(_files(found, split, path), path)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Row:
        return self.row(index)

    @property
    def columns(self) -> Sequence[str]:
        """The columns of the first file."""
        return self._opened[0].columns

    def row(self, index: int, columns: Sequence[str] = ()) -> Row:
        """A row; with `columns`, at least these. Raises `UserError` if it cannot be read."""
        file = bisect_right(self._starts, index) - 1
        try:
            return self._opened[file].row(index - self._starts[file], columns)
        except ValueError as error:
            raise UserError(
                f"{self.place(index)} cannot be read ({error}); repair the data"
            ) from error

    def place(self, index: int) -> str:
        """The file of a row, and its number there, for messages."""
        if len(self.files) == 1:
            return f"{self.where}: row {index}"
        file = bisect_right(self._starts, index) - 1
        return f"{self.where}: {self.files[file].name}: row {index - self._starts[file]}"

    def check_columns(self, columns: Sequence[str], option: str) -> None:
        """Raise `UserError` for a column that the data set lacks."""
        for name in columns:
            for file, path in zip(self._opened, self.files, strict=True):
                if name not in file.columns:
                    raise UserError(
                        f"{option} names the column {name!r}, which {path} lacks; it has: "
                        f"{', '.join(file.columns)}"
                    )

    def hash(self) -> str:
        """BLAKE3 of the file, or of the digests of several files in order, as hexadecimal text."""
        digests = [
            _digest(path, path.stat().st_size, path.stat().st_mtime_ns) for path in self.files
        ]
        whole = digests[0] if len(digests) == 1 else blake3(b"".join(digests)).digest()
        return whole.hex()

    def check_hash(self, wanted: str) -> None:
        """Raise `UserError` unless the data are those of the run."""
        found = self.hash()
        if found != wanted:
            raise UserError(
                f"{self.where} has the hash {found}, but the option hash is {wanted}; get the data "
                f'that the run was created with, or, as its owner, give hash = "{found}" to a '
                "new run"
            )


def located(path: str, what: str = "data set", option: str = "hash") -> Path:
    """A path on this machine; raises `UserError` if there is none.

    `option` names its hash.
    """
    folders = os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep)
    candidates = [Path(path), *(Path(folder) / Path(path).name for folder in folders if folder)]
    for candidate in candidates:
        if candidate.exists():
            return candidate
    raise UserError(
        f"the {what} {path} is not on this machine; copy it there, or into a folder that the "
        f"variable {FOLDERS_VARIABLE} names (the option {option} in the run's manifest is its "
        'BLAKE3), or take part in a run that has where = "served" for this environment and needs '
        "no copy"
    )


@cache
def _digest(path: Path, size: int, changed: int) -> bytes:
    """BLAKE3 of a file; its size and time of change are part of the cache's key only."""
    return blake3(max_threads=blake3.AUTO).update_mmap(path).digest()


# --- files of a folder ---------------------------------------------------------------------------


def _files(path: Path, split: str | None, where: str) -> list[Path]:
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise UserError(f"{where} is no {', '.join(SUFFIXES)} file; convert it to one of them")
        if split is not None:
            raise UserError(f"split is {split!r}, but {where} is one file; remove split")
        return [path]
    found = sorted(each for each in path.rglob("*") if each.suffix in SUFFIXES)
    named = [each for each in found if _is_of(each.relative_to(path), split or "train")]
    if split is not None and not named:
        names = ", ".join(sorted({str(each.relative_to(path)) for each in found})[:10])
        raise UserError(
            f"split is {split!r}, but {where} has no file or folder of that name; it has: "
            f"{names or 'no data'}"
        )
    chosen = named or found
    if not chosen:
        raise UserError(f"{where} holds no {', '.join(SUFFIXES)} file; give the data set's folder")
    configurations = sorted({_configuration(each.relative_to(path), split) for each in chosen})
    if len(configurations) > 1:
        raise UserError(
            f"{where} holds several data sets ({', '.join(configurations[:10])}), whose rows would "
            f"be mixed; name the folder of one, such as {Path(where) / configurations[-1]}"
        )
    if len(chosen) > FILES_MAX:
        raise UserError(f"{where} has {len(chosen)} files; {FILES_MAX} are the most; merge them")
    return chosen


def _is_of(path: Path, split: str) -> bool:
    """Whether a file belongs to a split: `train.jsonl`, `data/train-00000.parquet`, `train/0.…`."""
    name = path.stem
    return split in path.parts[:-1] or name == split or name.startswith((f"{split}-", f"{split}_"))


def _configuration(path: Path, split: str | None) -> str:
    """The folder of a data set's configuration, as the hub has several beside each other.

    `main/train-0.parquet` and `main/train/0.parquet` are of `main`.
    """
    folders = list(path.parts[:-1])
    if (split or "train") in folders:
        folders = folders[: folders.index(split or "train")]
    return "/".join(folders) or "."


def _open(path: Path) -> RowFile:
    try:
        return JsonLines(path) if path.suffix == ".jsonl" else ParquetRows(path)
    except (OSError, ValueError) as error:  # pyarrow's errors are subclasses of these
        raise UserError(
            f"{path} cannot be read ({_first_line(error)}); get it again, or give another file"
        ) from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


# --- formats --------------------------------------------------------------------------------------


class JsonLines:
    """A file with one JSON object per line, mapped into memory; empty lines are left out."""

    def __init__(self, path: Path) -> None:
        self._lines = array("Q")
        """Offset of each line."""
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            self._text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        for start, end in self._bounds():
            if self._text[start:end].strip():
                self._lines.append(start)
        self.count = len(self._lines)
        self.columns: Sequence[str] = list(self.row(0, ())) if self.count else []

    def _bounds(self) -> Iterator[tuple[int, int]]:
        start = 0
        while start < len(self._text):
            end = self._text.find(b"\n", start)
            end = len(self._text) if end < 0 else end
            yield start, end
            start = end + 1

    def row(self, index: int, columns: Sequence[str]) -> Row:
        start = self._lines[index]
        end = self._text.find(b"\n", start)
        line = self._text[start : len(self._text) if end < 0 else end]
        if len(line) > LINE_BYTES_MAX:
            raise ValueError(f"it has {len(line)} bytes; {LINE_BYTES_MAX} are the most")
        try:
            found = json.loads(line)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object")
        for name in columns:
            if name not in found:
                raise ValueError(f"it lacks {name!r}")
        return found


class ParquetRows:
    """A Parquet file, of which the row groups in use are decoded."""

    def __init__(self, path: Path) -> None:
        import pyarrow.parquet

        self._file = pyarrow.parquet.ParquetFile(path, memory_map=True)
        self.columns: Sequence[str] = list(self._file.schema_arrow.names)
        counts = [
            self._file.metadata.row_group(index).num_rows
            for index in range(self._file.metadata.num_row_groups)
        ]
        self._starts = [0, *accumulate(counts)]
        self.count = self._starts[-1]
        self._groups: Recent[tuple[int, tuple[str, ...]], Any] = Recent(GROUPS_KEPT)

    def row(self, index: int, columns: Sequence[str]) -> Row:
        group = bisect_right(self._starts, index) - 1
        key = (group, tuple(columns))
        wanted = list(columns) or None
        read = self._groups.of(key, lambda: self._file.read_row_group(group, columns=wanted))
        return _plain(read, index - self._starts[group], columns)


def _plain(table: Any, index: int, wanted: Sequence[str]) -> Row:
    """A row of an Arrow table, with times and decimals as text.

    Text that was stored as bytes is text again. Of other bytes, such as pictures, nothing is left;
    in a column that is `wanted` they raise `ValueError`.
    """
    (row,) = table.slice(index, 1).to_pylist()
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
