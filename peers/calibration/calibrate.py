"""The whole comparison: honest engines against each other, cheats against the validator."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from peers.calibration import weights
from peers.calibration.measure import Sample, sample
from peers.calibration.workers import BestOf, Drafts, Generates, Nucleus, TakesTies, Worker
from peers.calibration.workload import Workload
from peers.engines.native import NativeEngine
from swarm.world.progress import checkpoint

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
    threads: int = 1
    batch: int = 1 << 20

    @property
    def name(self) -> str:
        """Its label in tables; thresholds may differ by dtype and device, not by the rest."""
        whole = self.batch == 1 << 20
        parts = [self.dtype, self.device, f"{self.threads} threads" if self.threads > 1 else ""]
        return " ".join(part for part in [*parts, "" if whole else f"batch {self.batch}"] if part)

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


@dataclass
class Calibration:
    """All samples, by worker."""

    honest: dict[str, list[Sample]] = field(default_factory=dict)
    """By pair of engine classes, "worker → validator"."""
    attacks: dict[str, list[Sample]] = field(default_factory=dict)


def calibrate(
    folder: Path,
    workload: Workload,
    classes: Sequence[EngineClass],
    submissions: int,
    previous: Sequence[Path] = (),
    name: str = "calibration",
    report: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Measure honest pairs of `classes` and every attack, `submissions` submissions each.

    Attacks run in the first class, and the same class validates them.
    """
    found = Calibration()
    with tempfile.TemporaryDirectory() as aside:
        for validator_class in classes:
            validator = validator_class.engine(folder)
            for worker_class in _spread(classes):
                pair = f"{worker_class.name} → {validator_class.name}"
                report(f"honest {pair}")
                worker = Generates(
                    worker_class.engine(folder), worker_class.batch, worker_class.threads
                )
                found.honest[pair] = _samples(worker, validator, workload, submissions, name)
        validator = classes[0].engine(folder)
        for attack, cheat in attacks(folder, Path(aside), classes[0], previous):
            report(f"attack: {attack}")
            found.attacks[attack] = _samples(cheat, validator, workload, submissions, name)
    return found


def _samples(
    worker: Worker, validator: NativeEngine, workload: Workload, submissions: int, name: str
) -> list[Sample]:
    found = []
    for number in range(submissions):
        checkpoint()
        found.append(sample(worker, validator, workload, number, name))
    return found


def _spread(classes: Sequence[EngineClass]) -> list[EngineClass]:
    """The classes, and each with two threads and with one row at a time."""
    return [
        variant
        for each in classes
        for variant in (
            each,
            EngineClass(each.dtype, each.device, threads=2),
            EngineClass(each.dtype, each.device, batch=3),
        )
    ]


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
