"""How much honest engines differ on a run's model and prompts, and thresholds from that."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from msgspec.structs import replace

from peers.calibration.work import HandedIn, Sample, Workload, find, hand_in
from peers.engines.device import DTYPES, find_device
from peers.engines.native import NativeEngine
from peers.environments import Environment
from peers.proofs.format import chunk_count
from swarm.errors import UserError
from swarm.wire.manifest import Sampling, Thresholds
from swarm.world.progress import checkpoint

SAFETY = 2.0
"""Factor on honest margins, mean and largest."""

ERROR_SAFETY = 1.3
"""Factor on the honest mean error of proofs, which varies less between machines."""

LEAST = Thresholds()
"""Least bounds on margins where engines round at all: the demo's, from two million tokens. A few
thousand tokens of a policy that is mostly certain have too few mismatches to say less."""

LEAST_EXACT = Thresholds(honest_margin=2e-5, margin_max=0.05)
"""The same where no token was a mismatch, as in fp32: until a tie of one in a million comes."""

HONEST_ERROR_MIN = 0.002
"""Least bound on the mean error of proofs: a quarter of the last bit of each bf16 value."""

LOG_DIFFERENCE_MIN = 0.01
"""Least bound on the difference of two engines' log-probabilities, in nats."""

RUN_TOKENS = 1e9
"""Tokens among which no honest margin should exceed the bound on a single one."""

TAIL_MIN = 10
"""Largest mismatches that are extrapolated at least, if there are so many."""

DEVIATIONS = 8
"""Standard deviations kept between honest chunks and the limits on a single proof."""


def propose(honest: Sequence[Sequence[Sample]], base: Thresholds | None = None) -> Thresholds:
    """Thresholds that no honest work comes near; `honest` has one list per pair of engines. A few
    thousand tokens per pair are enough for means, whose errors are counted between rollouts; the
    largest margin that a run will see is extrapolated."""
    chunks = [chunk for pair in honest for each in pair for chunk in each.found.chunks]
    exponents = [chunk.exponent_matches for chunk in chunks]
    means = [chunk.mantissa_mean for chunk in chunks]
    margin = max(
        _margin_bound([part for each in pair for part in _margins(each)]) for pair in honest
    )
    error = max(_bound([part for each in pair for part in _errors(each)]) for pair in honest)
    largest = max(_largest(np.concatenate([each.found.margins for each in p])) for p in honest)
    apart = max(_largest(each.differences) for pair in honest for each in pair)
    tokens = sum(each.tokens for pair in honest for each in pair)
    least = LEAST if largest else LEAST_EXACT
    lowest = min(min(exponents), float(np.mean(exponents) - DEVIATIONS * np.std(exponents)))
    return replace(
        base or Thresholds(),
        proof_exponents_min=max(0, math.floor(lowest) - 2),
        proof_mantissa_mean_max=_digits(
            max(max(means), float(np.mean(means) + DEVIATIONS * np.std(means))) * ERROR_SAFETY + 1
        ),
        proof_mantissa_median_max=max(chunk.mantissa_median for chunk in chunks) + 2,
        honest_margin=_digits(max(least.honest_margin, SAFETY * margin)),
        margin_max=_digits(max(least.margin_max, SAFETY * largest)),
        honest_proof_error=_digits(max(HONEST_ERROR_MIN, ERROR_SAFETY * error)),
        honest_outliers=_digits(max(1e-6, 3 / tokens)),
        log_difference_max=_digits(min(20.0, max(LOG_DIFFERENCE_MIN, SAFETY * apart))),
        measured_tokens=tokens,
    )


Scores = np.ndarray[tuple[int], np.dtype[np.float64]]


def _margins(sample: Sample) -> list[Scores]:
    return np.split(np.minimum(sample.found.margins, 1.0), np.cumsum(sample.lengths)[:-1])


def _errors(sample: Sample) -> list[Scores]:
    ends = np.cumsum([chunk_count(length) for length in sample.lengths])[:-1]
    return np.split(sample.found.errors, ends)


def _bound(parts: Sequence[Scores]) -> float:
    """Mean of all scores plus three standard errors, counted between rollouts."""
    sums = np.array([part.sum() for part in parts])
    counts = np.array([len(part) for part in parts])
    mean = sums.sum() / counts.sum()
    error = np.sqrt(np.square(sums - mean * counts).sum()) / counts.sum()
    return float(mean + 3 * error)


def _margin_bound(parts: Sequence[Scores]) -> float:
    """The same of margins, or as if three more had been as large as the largest, if that is more.

    So few mismatches have no spread: of none, up to three are expected (95 %)."""
    mean = sum(float(part.sum()) for part in parts) / sum(map(len, parts))
    largest = max(float(part.max(initial=0.0)) for part in parts)
    return max(_bound(parts), mean + 3 * largest / sum(map(len, parts)))


def _largest(margins: Scores) -> float:
    """The largest margin among `RUN_TOKENS` tokens, if large margins fall off exponentially, at the
    mean excess over the largest tenth plus three standard errors. The largest one alone says
    little: among 10,000 honest tokens it was 0.37, among 3,000 others 0.62."""
    found = np.sort(margins[margins > 0])
    if not len(found):
        return 0.0
    count = min(len(found), max(TAIL_MIN, len(found) // 10))
    least = float(found[-count - 1]) if count < len(found) else 0.0
    rate = float((found[-count:] - least).mean()) * (1 + 3 / math.sqrt(count))
    return max(float(found[-1]), least + rate * math.log(RUN_TOKENS * count / len(margins)))


def _digits(value: float) -> float:
    """Two significant digits, rounded up."""
    unit: float = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.2g}")


PROPOSED = (
    "proof_exponents_min",
    "proof_mantissa_mean_max",
    "proof_mantissa_median_max",
    "honest_margin",
    "margin_max",
    "honest_proof_error",
    "honest_outliers",
    "log_difference_max",
    "measured_tokens",
    "measured_dtypes",
)
"""Thresholds that depend on the model and the engines."""

GROUPS, GROUP_SIZE, TOKENS_MAX = 16, 4, 64
"""4,096 tokens of each engine class: enough for means, and two minutes for four pairs of a model of
135 million parameters on two cores."""

HEADER = (
    f"{'worker → validator':<34}  tokens  changed  mean margin  max margin  proof error  exponents"
)

Show = Callable[[str], None]
Advance = Callable[[int, int], None]
"""(pairs recomputed, of how many)"""


@dataclass(frozen=True)
class EngineClass:
    """An engine as it may run on a peer."""

    dtype: str
    device: str

    @property
    def name(self) -> str:
        return f"{self.dtype} {self.device}"

    def engine(self, folder: Path, kind: type[NativeEngine] = NativeEngine) -> NativeEngine:
        return kind(folder, torch.device(self.device), getattr(torch, self.dtype))


def engine_classes(names: Sequence[str] = ()) -> list[EngineClass]:
    """Engine classes of `dtype[:device]` names (all devices' by default); raises `UserError`."""
    if not names:
        devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        names = [f"{dtype}:{each}" for each in devices for dtype in ("float32", "bfloat16")]
    found = []
    for dtype, _, device in (name.partition(":") for name in names):
        find_device(device or "cpu")
        if dtype not in DTYPES:
            raise UserError(f"--class names {dtype!r}; dtypes are {', '.join(DTYPES)}")
        found.append(EngineClass(dtype, device or "cpu"))
    return found


@dataclass(frozen=True)
class Calibrated:
    """Proposed thresholds, and how much was measured."""

    thresholds: Thresholds
    chunks: int

    @property
    def toml(self) -> str:
        """The `[thresholds]` table of a run description, with the bounds on false positives."""
        chunks, tokens = self.chunks, self.thresholds.measured_tokens
        lines = [
            f"# Measured on {tokens} honest tokens and {chunks} proofs. False positives: a pooled "
            f"check refuses an honest submission with p <= {self.thresholds.refusal_p_value:g};",
            f"# an honest worker is ever evicted with p <= {self.thresholds.eviction_p_value:g}. "
            f"No proof and no token came near its own limit: p < {3 / chunks:.1g} and "
            f"{3 / tokens:.1g} each (95 %).",
            "[thresholds]",
            *(f"{name} = {json.dumps(getattr(self.thresholds, name))}" for name in PROPOSED),
        ]
        return "\n".join(lines) + "\n"


def measure_run(
    model: Path,
    environments: Sequence[Environment],
    sampling: Sampling,
    engines: Sequence[str],
    show: Show,
    advance: Advance,
    temperatures: Sequence[float] = (),
) -> Calibrated:
    """Measure thresholds for a run with its own prompts; raises `UserError`. `temperatures`: those
    of its environments, each measured with all of them; empty: `sampling`'s.

    A submission has `GROUPS` prompts with up to four times `GROUP_SIZE` completions where they are
    short; they are as long as the run's, up to `TOKENS_MAX`: honest differences do not grow with
    the length (docs/benchmarks.md)."""
    longest = min(sampling.max_new_tokens, TOKENS_MAX)
    measured = replace(
        sampling,
        max_new_tokens=longest,
        group_size=GROUP_SIZE * min(4, TOKENS_MAX // longest),
        groups_per_submission=GROUPS,
    )
    classes = engine_classes(engines)
    found: list[Sample] = []
    for temperature in dict.fromkeys(temperatures or [sampling.temperature]):
        workload = Workload(model, replace(measured, temperature=temperature), environments)
        found += measure_pairs(model, workload, classes, show, advance).values()
    dtypes = sorted({each.dtype for each in classes})
    thresholds = replace(propose([[each] for each in found]), measured_dtypes=dtypes)
    return Calibrated(thresholds, sum(len(each.found.chunks) for each in found))


def measure_pairs(
    folder: Path,
    workload: Workload,
    classes: Sequence[EngineClass],
    show: Show = lambda _line: None,
    advance: Advance = lambda _done, _all: None,
) -> dict[str, Sample]:
    """A submission of each pair of classes, "worker → validator"; one engine is loaded at once."""
    show(HEADER)
    work, sampling = workload.work(0), workload.sampling
    handed_in: dict[EngineClass, HandedIn] = {}
    found: dict[str, Sample] = {}
    for validator in [*classes, *classes[:-1]]:
        engine = validator.engine(folder)
        if validator not in handed_in:
            handed_in[validator] = hand_in(engine, work, sampling)
        for generated, given in handed_in.items():
            row = f"{generated.name} → {validator.name}"
            if row in found:
                continue
            checkpoint()
            judged = find(engine, work, sampling, given)
            apart = np.abs(judged.log_probabilities - given.log_probabilities)
            lengths = [len(tokens) for tokens in given.completions]
            found[row] = Sample(judged, lengths, differences=apart)
            advance(len(found), len(classes) ** 2)
            show(_row(row, found[row]))
    return found


def _row(name: str, sample: Sample) -> str:
    margins, errors = sample.found.margins, sample.found.errors
    exponents = min(chunk.exponent_matches for chunk in sample.found.chunks)
    return (
        f"{name:<34}  {len(margins):>6}  {(margins > 0).mean():>7.2%}  "
        f"{np.minimum(margins, 1.0).mean():>11.2g}  {margins.max():>10.2g}  "
        f"{errors.mean():>11.4f}  {exponents:>9}"
    )
