"""Rows of a data set by index: JSON lines, JSON, Parquet, a folder of them, or one of the hub.

Rows of JSON lines are read when they are asked for, and of Parquet the row groups in use are
decoded, so a data set may be larger than memory. pyarrow is imported when a file needs it."""

import os
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate, takewhile
from pathlib import Path, PurePath
from typing import Any, Self

from blake3 import blake3

from peers.environments.columns import Row, column_of, listed, matches, value_of
from peers.environments.row_files import RowFile, first_line, open_rows
from peers.models.find import hub_name
from swarm.errors import UserError

SUFFIXES = (".parquet", ".jsonl", ".json")
FOLDERS_VARIABLE = "SWARM_DATASETS"
"""Environment variable: folders that hold data sets, separated as in PATH."""

VALUES_SHOWN = 8
"""Other values that are named when no row meets a condition."""


class Rows:
    """The rows of a data set, in the order of its files."""

    def __init__(self, files: Sequence[Path], where: str) -> None:
        """Open the files; `where` names the data set in errors. Raises `UserError`."""
        self.files, self.where = tuple(files), where
        self._states = [_state(path) for path in files]
        self._opened = [open_rows(path) for path in files]
        self._starts = [0, *accumulate(each.count for each in self._opened)]
        if not len(self):
            raise UserError(f"{where} has no rows; give a data set with at least one")

    @classmethod
    def at(cls, path: str, split: str | None = None, subset: str | None = None) -> Self:
        """Open the files of `files_at`; raises `UserError`."""
        return cls(*cls.files_at(path, split, subset))

    @staticmethod
    def files_at(
        path: str, split: str | None = None, subset: str | None = None
    ) -> tuple[Sequence[Path], str]:
        """The file or folder `path`, one of that name in `FOLDERS_VARIABLE`, or a data set of the
        hub, OWNER/NAME[@REVISION], which is downloaded once; and its name in errors.

        Of several splits, `split` (default: train) is read; of several data sets in one folder,
        that in the folder `subset`, or all (`*`). Raises `UserError`."""
        found = _on_this_machine(path)
        named = None if found or path.endswith(SUFFIXES) else hub_name(path)
        if named is None:
            found = found or located(path)
            if found.is_file():
                if found.suffix not in SUFFIXES:
                    raise UserError(f"{path} is no {', '.join(SUFFIXES)} file; convert it to one")
                if split is not None or subset is not None:
                    raise UserError(f"{path} is one file; remove split and subset")
                return [found], path
            inside = [each.relative_to(found) for each in found.rglob("*")]
            return [found / each for each in chosen_files(inside, split, subset, path)], path
        from peers.models.hub import download_data

        choose = partial(chosen_files, split=split, subset=subset, where=path)
        commit, files = download_data(*named, choose)
        return files, f"{named[0]}@{commit}"

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
        except (ValueError, OSError) as error:  # of pyarrow's errors, too
            raise UserError(
                f"{self.place(index)} cannot be read ({first_line(error)}); repair the data"
            ) from error

    def values(self, index: int, names: Sequence[str]) -> Row:
        """The values of these names in a row (`value_of`); raises `UserError`."""
        file = bisect_right(self._starts, index) - 1
        row = self.row(index, self._columns_of(names, self._opened[file]))
        try:
            return {name: value_of(row, name) for name in names}
        except ValueError as error:
            raise UserError(
                f"{self.place(index)} cannot be used ({error}); repair the data, or name another "
                "column"
            ) from error

    @staticmethod
    def _columns_of(names: Iterable[str], file: RowFile) -> list[str]:
        return list({found[0]: None for each in names if (found := column_of(each, file.columns))})

    def matching(self, conditions: Mapping[str, Any], option: str) -> Sequence[int]:
        """The rows that meet all conditions, and those that cannot be read, which a look at the
        rows names. Raises `UserError` if none meets them."""
        self.check_columns(list(conditions), option)
        found, is_met = array("Q"), False
        others: dict[str, None] = {}
        for start, file in zip(self._starts, self._opened, strict=False):
            columns = self._columns_of(list(conditions), file)
            for index, row in enumerate(file.each(columns), start):
                failed = "" if row is None else _failed(row, conditions)
                if not failed:
                    found.append(index)
                    is_met = is_met or row is not None
                elif len(others) < VALUES_SHOWN:
                    others[failed] = None
        if not is_met:
            raise UserError(
                f"{option} leaves none of the {len(self):,} rows of {self.where}, which have "
                f"{', '.join(others) or 'nothing that can be read'}; change the condition"
            )
        return found

    def check_unchanged(self, index: int) -> None:
        """Raise `UserError` if the file of a row has changed since it was opened."""
        file = bisect_right(self._starts, index) - 1
        if not self.files[file].exists() or _state(self.files[file]) != self._states[file]:
            raise UserError(
                f"{self.files[file]} has changed since it was opened, so its rows may be others; "
                "restore it, and start again"
            )

    def place(self, index: int) -> str:
        """The file of a row, and its number there, for messages."""
        if len(self.files) == 1:
            return f"{self.where}: row {index}"
        file = bisect_right(self._starts, index) - 1
        return f"{self.where}: {self.files[file].name}: row {index - self._starts[file]}"

    def check_columns(self, names: Sequence[str], option: str) -> None:
        """Raise `UserError` for a name whose column the data set lacks."""
        for name in names:
            for file, path in zip(self._opened, self.files, strict=True):
                if column_of(name, file.columns) is None:
                    raise UserError(
                        f"{option} names the column {name!r}, which {path} lacks; it has: "
                        f"{listed(name, file.columns)}"
                    )

    def hash(self) -> str:
        """BLAKE3 of the file, or of the digests of several files in order, as hexadecimal text."""
        digests = [_digest(path, _state(path)) for path in self.files]
        whole = digests[0] if len(digests) == 1 else blake3(b"".join(digests)).digest()
        return whole.hex()

    def check_hash(self, wanted: str, option: str = "hash") -> None:
        """Raise `UserError` unless the data are those of the run."""
        found = self.hash()
        if found != wanted:
            raise UserError(
                f"{self.where} has the hash {found}, but the option {option} is {wanted}; get the "
                f'data that the run was created with, or, as its owner, give {option} = "{found}" '
                "to a new run"
            )


def _on_this_machine(path: str) -> Path | None:
    folders = os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep)
    candidates = [Path(path), *(Path(folder) / Path(path).name for folder in folders if folder)]
    return next((each for each in candidates if each.exists()), None)


def located(path: str, what: str = "data set", option: str = "hash") -> Path:
    """A path on this machine; raises `UserError`, naming its hash's `option`, if there is none."""
    if (found := _on_this_machine(path)) is not None:
        return found
    raise UserError(
        f"the {what} {path} is not on this machine; copy it there, or into a folder that the "
        f"variable {FOLDERS_VARIABLE} names (the option {option} in the run's manifest is its "
        'BLAKE3), or take part in a run that has where = "served" for this environment and needs '
        "no copy"
    )


def _failed(row: Row, conditions: Mapping[str, Any]) -> str:
    """The first condition that a row does not meet, and what it has instead; or nothing."""
    for name, wanted in conditions.items():
        try:
            value = value_of(row, name)
        except ValueError:
            return f"no {name}"
        if not matches(value, wanted):
            return f"{name} = {value!r:.40}"
    return ""


def _state(path: Path) -> tuple[int, int]:
    """Size, and time of the last change."""
    found = path.stat()
    return found.st_size, found.st_mtime_ns


@cache
def _digest(path: Path, state: tuple[int, int]) -> bytes:
    """BLAKE3 of a file; its state is part of the cache's key only."""
    return blake3(max_threads=blake3.AUTO).update_mmap(path).digest()


def chosen_files(
    names: Sequence[PurePath], split: str | None, subset: str | None, where: str
) -> list[PurePath]:
    """The files of a data set among all names of a folder or a repository; raises `UserError`."""
    found = sorted(each for each in names if each.suffix in SUFFIXES)
    # Beside Parquet or JSON lines, .json files describe the data.
    found = [each for each in found if each.suffix != ".json"] or found
    if subset not in (None, "*"):
        inside = [each for each in found if PurePath(subset or "") in each.parents]
        if not inside:
            folders = dict.fromkeys(str(each.parent) for each in found)
            raise UserError(
                f"subset is {subset!r}, but {where} has no data in a folder of that name; it has: "
                f"{listed(str(subset), folders) or 'no data'}"
            )
        found = inside
    named = [each for each in found if _is_of(each, split or "train")]
    if split is not None and not named:
        files = ", ".join(map(str, found[:10]))
        raise UserError(
            f"split is {split!r}, but {where} has no file or folder of that name; it has: "
            f"{files or 'no data'}"
        )
    chosen = named or found
    if not chosen:
        raise UserError(f"{where} holds no {', '.join(SUFFIXES)} file; give the data set's folder")
    configurations = sorted({_configuration(each, split) for each in chosen})
    if len(configurations) > 1 and subset != "*":
        raise UserError(
            f"{where} holds several data sets ({', '.join(configurations[:10])}), whose rows would "
            f'be mixed; name the folder of one, such as subset = "{configurations[-1]}", or take '
            f'all with subset = "*"'
        )
    return chosen


def _is_of(path: PurePath, split: str) -> bool:
    """Whether a file belongs to a split: `train.jsonl`, `data/train-00000.parquet`, `train/0.…`."""
    name = path.stem
    return split in path.parts[:-1] or name == split or name.startswith((f"{split}-", f"{split}_"))


def _configuration(path: PurePath, split: str | None) -> str:
    """A configuration's folder: `main` of `main/train-0.parquet` and of `main/train/0.parquet`."""
    return "/".join(takewhile(lambda part: part != (split or "train"), path.parts[:-1])) or "."
