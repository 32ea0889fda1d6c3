"""Measures honest pairs of engine classes, and cheats against one of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

import blake3
import msgspec
import numpy as np
import torch

from peers.calibration import weights
from peers.calibration.measure import Sample, find, sample_of
from peers.calibration.workers import (
    BestOf,
    Drafts,
    Generates,
    HandedIn,
    Nucleus,
    TakesTies,
    Worker,
)
from peers.calibration.workload import Work, Workload
from peers.engines.engine import Engine
from peers.engines.model import weight_files
from peers.engines.native import NativeEngine
from peers.proofs.toploc import ChunkResult
from peers.validator.recompute import Found
from swarm.version import __version__
from swarm.wire.manifest import Sampling
from swarm.world.progress import checkpoint

# What was measured, on disk, so that a stopped measurement goes on where it stopped.
#
# A submission's tokens and proofs are kept once, and what each validator found of them beside them.
# So other thresholds, or another validator, need no generation.

_T = TypeVar("_T")


class _Found(msgspec.Struct, array_like=True):
    """`Found`, its arrays as little-endian float64."""

    chunks: list[ChunkResult]
    margins: bytes
    ties: list[list[bool]]


class Kept:
    """A folder of submissions and of what validators found of them.

    `basis` is everything that they depend on beside their names; another basis is another folder.
    Without a folder they are kept in memory.
    """

    def __init__(self, folder: Path | None, *basis: object) -> None:
        digest = blake3.blake3(msgspec.msgpack.encode([__version__, *map(str, basis)]))
        self._folder = None if folder is None else folder / digest.hexdigest()[:16]
        self._held: dict[Path, bytes] = {}
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)

    def handed_in(self, worker: str, number: int, make: Callable[[], HandedIn]) -> HandedIn:
        """Submission `number` of a worker, made only if it is not kept."""
        return self._get(self._path(worker, number), HandedIn, make)

    def found(self, worker: str, validator: str, number: int, make: Callable[[], Found]) -> Found:
        """What a validator finds of a submission, computed only if it is not kept."""

        def packed() -> _Found:
            found = make()
            return _Found(found.chunks, found.margins.astype("<f8").tobytes(), found.ties)

        kept = self._get(self._path(worker, number, validator), _Found, packed)
        errors = np.array([each.error for each in kept.chunks])
        return Found(kept.chunks, errors, np.frombuffer(kept.margins, "<f8"), kept.ties)

    def _path(self, worker: str, number: int, validator: str = "") -> Path:
        name = f"{worker}, {number}" + (f", {validator}" if validator else "")
        return (self._folder or Path()) / f"{name.replace('/', '-')}.msgpack"

    def _get(self, path: Path, kind: type[_T], make: Callable[[], _T]) -> _T:
        try:
            raw = self._held[path] if self._folder is None else path.read_bytes()
            return msgspec.msgpack.decode(raw, type=kind)
        except (KeyError, FileNotFoundError, msgspec.MsgspecError):  # or cut off by a full disk
            made = make()
        raw = msgspec.msgpack.encode(made)
        if self._folder is None:
            self._held[path] = raw
        else:
            part = path.with_suffix(".part")
            part.write_bytes(raw)
            part.replace(path)
        return made


TEMPERATURES = (0.9, 1.1)
TOP_P = (0.99, 0.95)
TRIES = (2, 4)
TIE_WIDTHS = (0.1, 0.5)
CHANGES: dict[str, Callable[[], weights.Change]] = {
    "other weights (2 % noise)": lambda: weights.noisy(0.02),
    "fp8 weights": lambda: weights.fp8,
    "int8 weights": lambda: weights.int8,
    "int4 weights": lambda: weights.int4,
    "one layer off by 5 %": lambda: weights.one_layer(0.05),
}


@dataclass(frozen=True)
class EngineClass:
    """An engine as it may run on a peer."""

    dtype: str
    device: str

    @property
    def name(self) -> str:
        """Its label in tables."""
        return f"{self.dtype} {self.device}"

    def engine(self, folder: Path, kind: type[NativeEngine] = NativeEngine) -> NativeEngine:
        """Load a model."""
        return kind(folder, torch.device(self.device), getattr(torch, self.dtype))


def engine_classes(names: Sequence[str] = ()) -> list[EngineClass]:
    """Engine classes from `dtype[:device]` names; by default fp32 and bf16 on every device here."""
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    if not names:
        return [
            EngineClass(dtype, device) for device in devices for dtype in ("float32", "bfloat16")
        ]
    pairs = [name.partition(":") for name in names]
    return [EngineClass(dtype, device or "cpu") for dtype, _, device in pairs]


Told = Callable[[str, list[Sample]], None]
"""(row, its submissions so far): called after each submission."""


@dataclass(frozen=True)
class Measurement:
    """A model, the work that is measured, and where it is kept."""

    folder: Path
    workload: Workload
    submissions: int
    kept: Kept
    name: str = "calibration"
    threads: int = 1
    """Of honest workers; the validators' are the process's."""

    @classmethod
    def of(
        cls, folder: Path, workload: Workload, submissions: int, keep: Path | None, *basis: object
    ) -> Measurement:
        """A measurement kept in a folder, or in memory. `basis`: what the workload depends on.

        Honest workers have as many threads as this process.
        """
        files = [*weight_files(folder), folder / "config.json"] if keep is not None else []
        stats = [(str(each.resolve()), each.stat()) for each in files]
        found = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
        kept = Kept(keep, found, workload.sampling, *basis)
        return cls(folder, workload, submissions, kept, threads=torch.get_num_threads())

    def honest(
        self, classes: Sequence[EngineClass], tell: Told = lambda _row, _samples: None
    ) -> dict[str, list[Sample]]:
        """The submissions of every pair of classes, by "worker → validator".

        Each class generates once, and a pair is one prefill. One engine is loaded at a time: in the
        second round the first classes recompute what the later ones generated.
        """
        found: dict[str, list[Sample]] = {}
        for index, each in enumerate([*classes, *classes[:-1]]):
            engine = cache(partial(each.engine, self.folder))
            for worker in classes[: index + 1]:
                row = f"{worker.name} → {each.name}"
                if row not in found:
                    makes = engine if worker is each else partial(worker.engine, self.folder)
                    pair = worker.name, each.name
                    honest = partial(_honest, makes, self.threads)
                    found[row] = self._samples(pair, honest, engine, partial(tell, row))
        return found

    def cheats(
        self,
        engine_class: EngineClass,
        previous: Sequence[Path] = (),
        tell: Told = lambda _row, _samples: None,
    ) -> dict[str, list[Sample]]:
        """The submissions of every cheat, which computes in the validator's class."""
        found: dict[str, list[Sample]] = {}
        engine = cache(partial(engine_class.engine, self.folder))
        with tempfile.TemporaryDirectory() as aside:
            for name, cheat in attacks(self.folder, Path(aside), engine_class, previous):
                pair = f"{name}, {engine_class.name}", engine_class.name
                found[name] = self._samples(
                    pair, partial(_itself, cheat), engine, partial(tell, name)
                )
        return found

    def _samples(
        self,
        pair: tuple[str, str],
        worker: Callable[[], Worker],
        validator: Callable[[], Engine],
        tell: Callable[[list[Sample]], None],
    ) -> list[Sample]:
        """The submissions of a worker as a validator finds them, made only if they are not kept."""
        found: list[Sample] = []
        for number in range(self.submissions):
            checkpoint()
            work, sampling = self.workload.work(number, self.name), self.workload.sampling
            handed_in = self.kept.handed_in(
                pair[0], number, partial(_submit, worker, work, sampling)
            )
            given = work, sampling, handed_in
            figures = self.kept.found(*pair, number, partial(_find, validator, given))
            found.append(sample_of(figures, *given))
            tell(found)
        return found


def _honest(engine: Callable[[], Engine], threads: int) -> Worker:
    return Generates(engine(), threads=threads)


def _itself(worker: Worker) -> Worker:
    return worker


def _submit(worker: Callable[[], Worker], work: Work, sampling: Sampling) -> HandedIn:
    return worker().submit(work, sampling)


def _find(validator: Callable[[], Engine], given: tuple[Work, Sampling, HandedIn]) -> Found:
    return find(validator(), *given)


def attacks(
    folder: Path, aside: Path, engine_class: EngineClass, previous: Sequence[Path] = ()
) -> Iterator[tuple[str, Worker]]:
    """Every cheat, by name."""
    policy = engine_class.engine(folder)
    drafts = {}
    for number, (name, change) in enumerate(CHANGES.items()):
        changed = weights.write_changed(folder, aside / str(number), change())
        drafts[name] = engine_class.engine(changed)
        yield name, Generates(drafts[name])
    for older in previous:
        yield f"older policy {older.name}", Generates(engine_class.engine(older))
    for factor in TEMPERATURES:
        yield f"temperature {factor}", Generates(policy, temperature_factor=factor)
    for top_p in TOP_P:
        nucleus = engine_class.engine(folder, Nucleus)
        assert isinstance(nucleus, Nucleus)
        nucleus.top_p = top_p
        yield f"top-p {top_p}", Generates(nucleus)
    yield "pre-generated", Generates(policy, attempt=1)
    for tries in TRIES:
        yield f"best of {tries}", BestOf(policy, tries)
    yield "int4 decodes, policy proves", Drafts(drafts["int4 weights"], policy)
    for width in TIE_WIDTHS:
        yield f"takes near ties below {width} for reward", TakesTies(policy, width)
        yield f"takes near ties below {width} against it", TakesTies(policy, width, lowers=True)
