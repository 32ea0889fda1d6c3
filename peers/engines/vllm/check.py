"""The check at start-up: vLLM must agree with the native engine before it hands in any work.

vLLM has other kernels for every processor, model and version. A worker whose kernels are wrong here
would be refused by every validator, so it finds out first, and says by how much they differ."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from peers.engines.architecture import is_described
from peers.engines.batch import generate, requests_for
from peers.engines.config import read_config
from peers.engines.engine import Engine
from peers.engines.general import GeneralEngine
from peers.engines.memory import need_of
from peers.engines.native import NativeEngine
from peers.engines.noise import Drawn
from peers.engines.winners import margins
from swarm.errors import UserError
from swarm.jobs import Hardware
from swarm.world.machine import free_memory_bytes

PROMPT_LENGTHS = (2, 7, 33)
ROWS_PER_PROMPT = 3
NEW_TOKENS = 24
KEY = (0x5EED, 0xC0DE)


@dataclass(frozen=True)
class Agreement:
    """How far an engine is from the native one over the tokens of the check."""

    hidden: float
    """Norm of the difference of a token's hidden states over their norm, at most."""
    log_probability: float
    """Mean difference in nats. Of single tokens it is no measure: after prompts of random tokens
    SmolLM2 in bf16 differs by 0.42 nats on one, where the mean is some hundredths."""
    margin: float
    """Mean margin of tokens under the native engine's logits, at most 1 for each."""

    def __str__(self) -> str:
        return (
            f"hidden states {self.hidden:.2g}, log-probabilities {self.log_probability:.2g} nats, "
            f"margins {self.margin:.2g}"
        )

    def within(self, limits: Self) -> bool:
        """False for NaN, too."""
        return (
            self.hidden <= limits.hidden
            and self.log_probability <= limits.log_probability
            and self.margin <= limits.margin
        )


LIMITS = {
    "float32": Agreement(hidden=0.01, log_probability=1e-3, margin=1e-3),
    "bfloat16": Agreement(hidden=0.15, log_probability=0.1, margin=0.05),
}
"""By dtype. Measured on a CPU: 5e-3 (the rounding to bf16), 5e-6 and 0 in float32."""


def check_engine_agrees(engine: Engine, folder: Path) -> Agreement | None:
    """Compare an engine to the native one on the CPU; None: no memory; raises `UserError`."""
    capabilities = engine.capabilities
    hardware = Hardware(device="cpu", dtype=capabilities.dtype)
    need = need_of(folder, hardware, max(PROMPT_LENGTHS) + NEW_TOKENS)
    needed = need.weights_bytes + ROWS_PER_PROMPT * len(PROMPT_LENGTHS) * need.row_bytes
    free = free_memory_bytes()
    if needed > free:
        print(
            f"vLLM is not compared with the native engine: that takes {needed >> 20} MB of memory, "
            f"and {free >> 20} MB are free",
            file=sys.stderr,
        )
        return None
    own = NativeEngine if is_described(read_config(folder)) else GeneralEngine
    native = own(folder, "cpu", getattr(torch, capabilities.dtype))
    found = compare(engine, native)
    limits = LIMITS[capabilities.dtype]
    if not found.within(limits):
        raise UserError(
            f"engine {capabilities.name} {capabilities.version} computes other values than the "
            f"native engine on {capabilities.device} in {capabilities.dtype}: {found}; at "
            f"most: {limits}; use --engine native"
        )
    print(f"{capabilities.name} agrees with the native engine: {found}", file=sys.stderr)
    return found


@torch.inference_mode()
def compare(engine: Engine, native: Engine) -> Agreement:
    """Generate with one engine, prefill with the other, and compare."""
    size = engine.capabilities.vocabulary_size
    longest = engine.capabilities.length_max
    generator = torch.Generator().manual_seed(0)
    new = max(1, min(NEW_TOKENS, longest // 2))
    lengths = [max(1, min(length, longest - new)) for length in PROMPT_LENGTHS]
    prompts = [torch.randint(size, (n,), generator=generator).tolist() for n in lengths]
    prompts = [prompt for prompt in prompts for _ in range(ROWS_PER_PROMPT)]
    rows = range(len(prompts))
    made = generate(engine, requests_for(prompts, rows, KEY, 1.0, (), new))
    truth = native.prefill(
        [[*prompt, *piece.tokens] for prompt, piece in zip(prompts, made, strict=True)],
        [range(len(prompt), len(prompt) + new) for prompt in prompts],
    )
    hidden, differences, missed = [], [], []
    for row, piece in enumerate(made):
        own, theirs = truth.hidden[row].float().cpu(), piece.hidden.float().cpu()
        hidden.append((own - theirs).norm(dim=-1) / own.norm(dim=-1))
        drawn = Drawn(KEY, torch.full((new,), row), torch.arange(new))
        logits, tokens = native.logits(truth.states[row]).cpu(), torch.tensor(piece.tokens)
        judged = margins(logits, tokens, 1.0, drawn)
        differences.append((judged.log_probability - piece.log_probabilities.cpu()).abs())
        missed.append(judged.margin.clamp(max=1.0))
    apart, off, missing = map(torch.cat, (hidden, differences, missed))
    return Agreement(float(apart.max()), float(off.mean()), float(missing.mean()))  # NaN stays
