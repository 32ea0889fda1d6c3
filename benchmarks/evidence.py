"""Honest work and cheats on a real model: what the statistical checks make of them.

    python -m benchmarks.evidence --model SmolLM2-135M-Instruct --keep evidence

Prints one JSON object, and progress to standard error. Honest workers of `--tokens` tokens in all,
over every pair of bf16 and fp32, generate 32 rows at a time, 3 or one, with one thread or two.
Cheats hand in work of another policy, another temperature or another choice. Both answer chat
prompts, up to 128 tokens.

Every submission, and what a validator finds of it, is kept in `--keep`: a stopped measurement goes
on where it stopped, and another rule for thresholds is judged in seconds. The thresholds come from
one submission of each dtype, some 3,300 tokens of each pair, by the rule of `swarm run create`.
"""

from __future__ import annotations

import argparse
import json
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from benchmarks.common import at_least
from peers.calibration.calibrate import PROPOSED, EngineClass, propose
from peers.calibration.work import HandedIn, find
from peers.engines.config import read_config
from peers.engines.engine import Engine, Prefill
from peers.engines.loading import load
from peers.engines.model import read_weights
from peers.environments.interface import Grade, Message, SingleTurn, Task, Tasks, Transcript
from peers.environments.tasks import Generated
from peers.proofs.format import CHUNK_TOKENS, TOP_VALUES, chunk_count
from peers.validator.evidence.submission import Recomputed
from peers.validator.recompute import Found
from swarm.terminal.output import print_json
from swarm.version import __version__
from swarm.wire.manifest import Sampling, Thresholds
from tests.attacks import weights
from tests.attacks.assessment import Judged, area, assess, judged_of
from tests.attacks.cheats import BestOf, Generates, GradedWorkload, Work, Worker

T = TypeVar("T")

DTYPES = ("bfloat16", "float32")
GROUP_SIZE = 8
TOKENS_MAX = 128
WINDOW = 64
CALIBRATION = "to calibrate"
RATE = 2e-5
"""Learning rate of the optimiser step between the policy and the one before it."""

SUBJECTS = (
    "the tides", "a lighthouse keeper", "compound interest", "binary search",
    "the French Revolution", "how bread rises", "prime numbers", "a lost dog", "photosynthesis",
    "chess openings",
    "black holes", "a job interview", "recycling", "the Roman roads", "jazz", "vaccines",
    "garden soil", "a train journey", "sorting algorithms", "the moon landing", "tea", "glaciers",
    "electric cars", "a haunted house", "probability", "bees", "the printing press", "sleep",
)  # fmt: skip
FORMS = (
    "Explain {} to a child.", "Write a short story about {}.", "List five facts about {}.",
    "Write a Python function that has to do with {}.", "What is a common mistake about {}?",
    "Write a poem about {}.", "Give me a plan for learning about {}.", "Does {} matter?",
    "Compare {} with {}.", "Write a letter to a friend about {}.", "What is {} plus {}?",
)  # fmt: skip


class Chat(SingleTurn):
    """Chats about some subjects; a reward that a cheat can be after, for every other length."""

    name = "chat"
    version = "1"

    def tasks(self) -> Tasks:
        return Generated(self._make)

    def grade(self, task: Task, transcript: Transcript) -> Grade:
        return Grade(float(len(transcript.text) % 2))

    def _make(self, randomness: bytes) -> Task:
        form = FORMS[randomness[0] % len(FORMS)]
        subjects = [SUBJECTS[byte % len(SUBJECTS)] for byte in randomness[1:3]]
        more = " Be brief." if randomness[3] % 2 else ""
        return Task((Message("user", form.format(*subjects) + more),), "")


@dataclass(frozen=True)
class Contender:
    """A worker whose submissions are measured."""

    name: str
    dtype: str
    make: Callable[[Bench, str], Worker]
    submissions: int
    groups: int = 4
    older: bool = False
    """Whether validators have the policy of one optimiser step later."""
    threads: int = 1
    """Of the validators, too."""

    @property
    def label(self) -> str:
        return f"{self.name}, {self.dtype}"


class Bench:
    """Models, engines and what is kept of them."""

    def __init__(self, model: Path, keep: Path) -> None:
        self.model, self._aside = model, keep / "models"
        self.keep = keep
        self._engines: dict[tuple[Path, str], Engine] = {}

    def workload(self, groups: int) -> GradedWorkload:
        """Submissions of so many groups."""
        stop = read_config(self.model)["eos_token_id"]
        sampling = Sampling(
            temperature=1.0, max_new_tokens=TOKENS_MAX, stop_ids=[stop],
            group_size=GROUP_SIZE, groups_per_submission=groups,
        )  # fmt: skip
        return GradedWorkload(self.model, sampling, [Chat()])

    def engine(self, folder: Path, dtype: str) -> Engine:
        """An engine, loaded once; at most four are held."""
        if (folder, dtype) not in self._engines:
            while len(self._engines) >= 4:
                self._engines.pop(next(iter(self._engines)))
            self._engines[folder, dtype] = EngineClass(dtype, "cpu").engine(folder)
        return self._engines[folder, dtype]

    def changed(self, name: str, write: Callable[[Path], None]) -> Path:
        """A changed copy of the model, written once."""
        folder = self._aside / name
        if not (folder / "model.safetensors").exists():
            folder.mkdir(parents=True, exist_ok=True)
            write(folder)
        return folder

    def kept(self, name: str, make: Callable[[], T]) -> T:
        """What this folder holds of an earlier measurement by that name, or else what `make` gives,
        which it then holds."""
        path = self.keep / f"{self.model.resolve().name} {__version__}" / f"{name}.pickle"
        if path.exists():
            held: T = pickle.loads(path.read_bytes())  # written by this program
            return held
        made = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_bytes(pickle.dumps(made))
        part.replace(path)
        return made

    def handed_in(self, contender: Contender, number: int) -> tuple[Work, Sampling, HandedIn]:
        """A submission of a contender; `number` counts from 0."""
        workload = self.workload(contender.groups)
        work, sampling = workload.work(number, contender.label), workload.sampling

        def make() -> HandedIn:
            return contender.make(self, contender.dtype).submit(work, sampling)

        return work, sampling, self.kept(f"{contender.label}, {number}", make)

    def samples(self, contender: Contender, validator: str) -> Iterator[Judged]:
        """The submissions of a contender, as a validator finds them."""
        for number in range(contender.submissions):
            given = self.handed_in(contender, number)
            name = f"{contender.label}, {number}, {validator}"
            found = self.kept(name, partial(self._find, contender, validator, given))
            yield judged_of(found, *given)

    def _find(
        self, contender: Contender, validator: str, given: tuple[Work, Sampling, HandedIn]
    ) -> Found:
        folder = self.changed("one step later", self.take_step) if contender.older else self.model
        torch.set_num_threads(contender.threads)
        try:
            return find(self.engine(folder, validator), *given)
        finally:
            torch.set_num_threads(1)

    def take_step(self, folder: Path) -> None:
        """Write the policy after one step of Adam, which moves every weight by the rate.

        The gradient is that of rewards which are random, of one honest submission. Rounding to bf16
        is random, as for master weights that have long left the grid of bf16.
        """
        workload = self.workload(4)
        work = workload.work(0, "a step")
        worker = Generates(self.engine(self.model, "bfloat16"))
        completions = worker.submit(work, workload.sampling).completions
        model = load(self.model, torch.float32)
        generator = torch.Generator().manual_seed(0)
        for prompt, tokens in zip(work.prompts, completions, strict=True):
            whole = torch.tensor([[*prompt, *tokens]])
            logits = model(whole).logits[0, len(prompt) - 1 : -1]
            advantage = float(torch.randn((), generator=generator))
            losses = torch.nn.functional.cross_entropy(logits, whole[0, len(prompt) :])
            (advantage * losses).backward()  # type: ignore[no-untyped-call]
        stepped = {}
        for name, weight in model.named_parameters():
            moved = weight.detach() - RATE * weight.grad.sign()
            unit = torch.exp2(torch.floor(torch.log2(moved.abs().clamp(min=1e-30))) - 7)
            drawn = torch.rand(moved.shape, generator=generator)
            stepped[name] = (torch.floor(moved / unit + drawn) * unit).bfloat16()
        write_model(folder, stepped, read_config(self.model))


def write_model(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write weights and a config."""
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def with_window(bench: Bench, folder: Path) -> None:
    """The model with attention to the last `WINDOW` tokens only, as a Mistral."""
    config = read_config(bench.model) | {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": WINDOW,
    }
    write_model(folder, read_weights(bench.model), config)


def without_layer(bench: Bench, folder: Path) -> None:
    """The model without its middle layer."""
    config = read_config(bench.model)
    left_out = config["num_hidden_layers"] // 2
    tensors = {}
    for name, weight in read_weights(bench.model).items():
        layer = weights.LAYER.search(name)
        if layer is None or int(layer[1]) < left_out:
            tensors[name] = weight
        elif int(layer[1]) > left_out:
            tensors[name.replace(layer[0], f".layers.{int(layer[1]) - 1}.")] = weight
    write_model(folder, tensors, config | {"num_hidden_layers": config["num_hidden_layers"] - 1})


# --- the workers --------------------------------------------------------------------------------


def honest(batch: int, threads: int = 1) -> Callable[[Bench, str], Worker]:
    """Makes an honest worker."""
    return lambda bench, dtype: Generates(bench.engine(bench.model, dtype), batch, threads)


def another(name: str, write: Callable[[Bench, Path], None]) -> Callable[[Bench, str], Worker]:
    """Makes a worker with a changed model."""

    def make(bench: Bench, dtype: str) -> Worker:
        folder = bench.changed(name, partial(write, bench))
        return Generates(bench.engine(folder, dtype))

    return make


def rounded(change: weights.Change) -> Callable[[Bench, Path], None]:
    """Writes a model with changed weights."""

    def write(bench: Bench, folder: Path) -> None:
        weights.write_changed(bench.model, folder, change)

    return write


def contenders(tokens: int) -> list[Contender]:
    """Honest workers that generate about `tokens` tokens over four pairs, and cheats."""
    whole = GROUP_SIZE * 4 * TOKENS_MAX * 0.9
    most = max(1, round(tokens / len(DTYPES) ** 2 / whole) - 2)
    found = []
    for dtype in DTYPES:
        found += [
            Contender(CALIBRATION, dtype, honest(32), 3),
            Contender("int8", dtype, another("int8", rounded(weights.int8)), 4),
            Contender("fp8", dtype, another("fp8", rounded(weights.fp8)), 2, 1),
            Contender("int4", dtype, another("int4", rounded(weights.int4)), 2, 1),
            Contender(f"window of {WINDOW}", dtype, another("window", with_window), 2, 1),
            Contender("a layer left out", dtype, another("layer", without_layer), 2, 1),
            Contender("temperature 1.1", dtype, hotter, 2, 1),
            Contender("best of 2", dtype, best_of_two, 2, 1),
            Contender("honest, batch 3", dtype, honest(3), 3, 1),
            Contender("honest, batch 1", dtype, honest(1), 2, 1),
            Contender("honest, batch 3, two threads", dtype, honest(3, 2), 1, 1, threads=2),
            Contender("honest, batch 1, two threads", dtype, honest(1, 2), 1, 1, threads=2),
            Contender("honest, batch 32, two threads", dtype, honest(32, 2), 2, threads=2),
            Contender("one policy behind", dtype, honest(32), 4, older=True),
            Contender("honest, batch 32", dtype, honest(32), most),
        ]
    return found


def hotter(bench: Bench, dtype: str) -> Worker:
    """Samples at 1.1 times the temperature."""
    return Generates(bench.engine(bench.model, dtype), temperature_factor=1.1)


def best_of_two(bench: Bench, dtype: str) -> Worker:
    """Samples twice and keeps the better."""
    return BestOf(bench.engine(bench.model, dtype), 2)


# --- what thresholds make of it -----------------------------------------------------------------


def groups_of(sample: Judged) -> list[Judged]:
    """The groups of a submission as submissions of their own."""
    found, parts = sample.found, sample.recomputed
    size = len(parts.ties[0])
    lengths = sample.lengths
    tokens = np.cumsum([0, *lengths])
    chunks = np.cumsum([0, *map(chunk_count, lengths)])
    cut = []
    for group in range(len(parts.ties)):
        rows = slice(group * size, (group + 1) * size)
        of_tokens = slice(tokens[rows.start], tokens[rows.stop])
        of_chunks = slice(chunks[rows.start], chunks[rows.stop])
        margins, errors = found.margins[of_tokens], found.errors[of_chunks]
        only = Found(found.chunks[of_chunks], errors, margins, found.ties[rows])
        outcomes = [kind[group : group + 1] for kind in parts.outcomes]
        cut.append(
            Judged(
                only,
                lengths[rows],
                Recomputed(margins, errors, parts.ties[group : group + 1], outcomes),
            )
        )
    return cut


def figures(samples: list[Judged], limits: Thresholds) -> dict[str, Any]:
    """What thresholds make of a worker, and how soon if a submission is a single group."""
    whole = assess(samples, limits)
    cut = assess([part for each in samples for part in groups_of(each)], limits)
    return {
        "tokens": whole.tokens,
        "submissions": whole.submissions,
        "refused": whole.refused,
        "refused_by": whole.refused_by,
        "refused_groups": cut.refused,
        "groups": cut.submissions,
        "tokens_until_eviction": cut.tokens_until_eviction,
        "process": cut.process,
        "log_capital": round(max(whole.log_capital, cut.log_capital), 1),
        "mean_margin": whole.mean_margin,
        "margin_max": whole.margin_max,
        "mismatch_share": whole.mismatch_share,
        "mean_error": whole.mean_error,
        "exponents_min": whole.exponents_min,
        "bans_max": max(whole.bans),
    }


def completion_errors(samples: list[Judged]) -> list[float]:
    """The mean error of each completion's proofs."""
    found: list[float] = []
    for each in samples:
        ends = np.cumsum([chunk_count(length) for length in each.lengths])[:-1]
        found += [float(part.mean()) for part in np.split(each.found.errors, ends)]
    return found


def outliers(bench: Bench) -> dict[str, float]:
    """How far the dimensions after the last norm differ in size, and who fills proofs."""
    hidden = torch.cat([each.float() for each in one_prefill(bench, bench.model).hidden])
    size = hidden.abs().mean(0)
    ordered = size.sort(descending=True)
    chunk = hidden[: len(hidden) // CHUNK_TOKENS * CHUNK_TOKENS].reshape(
        -1, CHUNK_TOKENS, len(size)
    )
    top = chunk.flatten(1).abs().topk(TOP_VALUES).indices % len(size)
    counts = torch.bincount(top.flatten(), minlength=len(size)).sort(descending=True).values
    spread = hidden.std(0)[ordered.indices] / ordered.values
    return {
        "largest_dimension_by_median": float(ordered.values[0] / size.median()),
        "fourth_dimension_by_median": float(ordered.values[3] / size.median()),
        "share_of_values_in_four_dimensions": float(counts[:4].sum() / counts.sum()),
        "share_of_values_in_sixteen_dimensions": float(counts[:16].sum() / counts.sum()),
        "spread_of_the_largest_by_its_size": float(spread[0]),
    }


def behind(bench: Bench) -> dict[str, float]:
    """How far the policy one step behind is from the present one, per token that it samples."""
    later = bench.changed("one step later", bench.take_step)
    logs = []
    for folder in (bench.model, later):
        states = torch.cat(list(one_prefill(bench, folder).states))
        logs.append(torch.log_softmax(bench.engine(folder, "float32").logits(states), -1))
    old, new = logs
    return {"kl_per_token": float((old.exp() * (old - new)).sum(-1).mean())}


def one_prefill(bench: Bench, folder: Path) -> Prefill:
    """The hidden states of a submission of the model in fp32."""
    contender = next(each for each in contenders(1) if each.label == "to calibrate, float32")
    work, _, handed_in = bench.handed_in(contender, 0)
    rows = list(zip(work.prompts, handed_in.completions, strict=True))
    return bench.engine(folder, "float32").prefill(
        [[*prompt, *tokens] for prompt, tokens in rows],
        [range(len(prompt), len(prompt) + len(tokens)) for prompt, tokens in rows],
    )


def report(bench: Bench, measured: dict[tuple[str, str, str], list[Judged]]) -> dict[str, Any]:
    """What the thresholds that are measured on a few tokens make of everything else."""
    pairs: dict[tuple[str, str], list[Judged]] = {}
    for (name, dtype, validator), samples in measured.items():
        if name.startswith("honest"):
            pairs.setdefault((dtype, validator), []).extend(samples)
    few = {key: samples for key, samples in measured.items() if key[0] == CALIBRATION}
    limits = propose([samples[:1] for samples in few.values()])
    loosest = [
        error
        for (_, validator), samples in pairs.items()
        for error in completion_errors(samples)
        if validator == "bfloat16"
    ]
    honest = {f"{a} -> {b}": figures(samples, limits) for (a, b), samples in pairs.items()}
    rows = list(honest.values())
    return {
        "thresholds": {name: getattr(limits, name) for name in PROPOSED},
        "honest": honest,
        "honest_tokens": sum(each["tokens"] for each in rows),
        "honest_refused": sum(each["refused"] + each["refused_groups"] for each in rows),
        "honest_evicted": sum(each["tokens_until_eviction"] is not None for each in rows),
        "honest_by_worker": {
            f"{name}, {dtype} -> {validator}": figures(samples, limits)
            for (name, dtype, validator), samples in measured.items()
            if name.startswith("honest")
        },
        "with_the_defaults": {
            f"{a} -> {b}": figures(samples, Thresholds()) for (a, b), samples in pairs.items()
        },
        "cheats": {
            f"{name}, {dtype} -> {validator}": figures(samples, limits)
            | {"area": area(loosest, completion_errors(samples))}
            for (name, dtype, validator), samples in measured.items()
            if not name.startswith("honest") and name != CALIBRATION
        },
        "behind": behind(bench),
        "outliers": outliers(bench),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--keep", type=Path, required=True, help="folder of what was measured")
    parser.add_argument("--tokens", type=at_least(1), default=200_000, help="honest ones")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bench = Bench(arguments.model, arguments.keep)
    measured: dict[tuple[str, str, str], list[Judged]] = {}
    for contender in contenders(arguments.tokens):
        for validator in DTYPES:
            started, found = time.process_time(), list(bench.samples(contender, validator))
            measured[contender.name, contender.dtype, validator] = found
            print(
                f"{contender.label} -> {validator}: {sum(each.tokens for each in found)} tokens, "
                f"{time.process_time() - started:.0f} CPU s",
                file=sys.stderr,
                flush=True,
            )
    print_json(report(bench, measured))


if __name__ == "__main__":
    main()
