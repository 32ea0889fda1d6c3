"""How small a checkpoint's delta is, and how fast it is made and applied.

    python -m benchmarks.delta --model SmolLM2-135M-Instruct

Prints one JSON object. A model is trained as in reinforcement learning (fp32 weights, AdamW,
one thread) at learning rates of 1e-6 and 3e-7 and published in bf16. `bytes_ratio` is the delta's
bytes divided by the bf16 checkpoint's after one optimiser step, at the larger of the two rates.
Beside it are the sizes of zstd's output for the XOR of the two files, and for the file itself.
`--warm` optimiser steps come before the measured steps, so that AdamW's averages are as in the
middle of a run.

Speeds are bytes of the checkpoint per CPU second of one core: the median, minimum and maximum of
ten runs, from files in the page cache to files. `apply` makes the pieces, checks their BLAKE3 and
writes them into a file that has its size but no content yet, as in a fetch. `copy` does the same
without a delta: it reads, hashes and writes. No method that checks its output can be faster.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from blake3 import blake3
from safetensors.torch import save_file

from benchmarks.common import at_least, load_average, spread, timed
from peers.engines.loading import load
from peers.models.find import find_model
from swarm.shardcast.delta import encode, make
from swarm.shardcast.jobs import PieceToMake
from swarm.shardcast.manifest import piece_size_for
from swarm.terminal.output import print_json

FILE = "model.safetensors"
RATES = (1e-6, 3e-7)
STEPS = (1, 8)
REPEATS = 10


def publish(model: Any, folder: Path) -> Path:
    """Write the weights in bf16, as the trainer exports them."""
    folder.mkdir()
    tensors = {
        name: value.detach().to(torch.bfloat16).contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(tensors, folder / FILE)
    return folder


def train(base: Path, rate: float, warm: int, folder: Path) -> list[Path]:
    """Train; return folders of the policy after `warm`, and after 1 and 8 more optimiser steps."""
    model = load(base, torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.0)
    chance = torch.Generator().manual_seed(1)
    published = []
    for step in range(warm + STEPS[-1] + 1):
        if step == warm or step - warm in STEPS:
            published.append(publish(model, folder / f"{rate:g}-{step - warm}"))
        tokens = torch.randint(0, model.config.vocab_size, (2, 32), generator=chance)
        advantages = torch.randn(2, generator=chance)
        scores = torch.log_softmax(model(tokens).logits[:, :-1].float(), dim=-1)
        chosen = scores.gather(2, tokens[:, 1:, None])[..., 0].mean(1)
        loss = -(advantages * chosen).mean()  # the policy gradient of one group
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return published


def speed(
    name: str, size_bytes: int, work: Callable[[], Any], prepare: Callable[[], Any] = lambda: None
) -> dict[str, float]:
    """Measure GB per CPU second of `work` on `size_bytes`, ten times, without `prepare`."""
    speeds = []
    for _ in range(REPEATS):
        prepare()
        speeds.append(size_bytes / timed(work)[1] / 1e9)
    return spread(f"{name}_gb_per_second", speeds)


def measure(base: Path, new: Path, folder: Path) -> dict[str, Any]:
    old_data, data = (base / FILE).read_bytes(), (new / FILE).read_bytes()
    delta = folder / "delta"
    made = encode(base, new, delta, [FILE], limit_bytes=len(data) // 2)
    if not made.size_bytes:
        return {"bytes_ratio": 1.0, "changed_share": made.changed_words / made.words}
    encoded = speed(
        "encode", len(data), lambda: encode(base, new, delta, [FILE], limit_bytes=len(data))
    )
    size = piece_size_for(len(data))
    pieces = [
        PieceToMake(
            number, FILE, at, len(data[at : at + size]), blake3(data[at : at + size]).digest()
        )
        for number, at in enumerate(range(0, len(data), size))
    ]
    target = folder / "target"
    target.mkdir(exist_ok=True)

    def empty() -> None:
        with (target / FILE).open("wb") as file:
            file.truncate(len(data))

    def apply() -> None:
        if len(make(base, target, [delta], pieces)) < len(pieces):
            raise RuntimeError("a piece did not come out right")

    def copy() -> None:
        buffer = bytearray(size)
        with (
            (base / FILE).open("rb", buffering=0) as source,
            (target / FILE).open("r+b", buffering=0) as file,
        ):
            while count := source.readinto(buffer):
                part = memoryview(buffer)[:count]
                blake3(part).digest()
                file.write(part)

    copied = speed("copy", len(data), copy, empty)
    applied = speed("apply", len(data), apply, empty)
    if (target / FILE).read_bytes() != data:
        raise RuntimeError("the result is not bit for bit the same")
    xor = np.bitwise_xor(np.frombuffer(old_data, np.uint8), np.frombuffer(data, np.uint8)).tobytes()
    compressor = zstandard.ZstdCompressor(level=3)
    xor_bytes = len(compressor.compress(xor))
    return {
        "bytes_ratio": made.size_bytes / len(data),
        "changed_share": made.changed_words / made.words,
        "xor_zstd_ratio": xor_bytes / len(data),
        "full_zstd_ratio": len(compressor.compress(data)) / len(data),
        **encoded,
        **applied,
        **copied,
        **speed("xor_zstd", len(data), lambda: compressor.compress(xor)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a folder, a GGUF file, or a hub's name")
    parser.add_argument("--warm", type=at_least(1), default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    base = find_model(arguments.model, "--model").folder
    told: dict[str, Any] = {"bytes_ratio": 0.0, "load_average": load_average()}
    with tempfile.TemporaryDirectory(prefix="delta-") as name:
        for rate in RATES:
            policies = train(base, rate, arguments.warm, Path(name))
            told["checkpoint_bytes"] = (policies[0] / FILE).stat().st_size
            told[f"lr_{rate:g}"] = {
                f"after_{steps}": {
                    key: float(f"{value:.4g}")
                    for key, value in measure(policies[0], policy, Path(name)).items()
                }
                for steps, policy in zip(STEPS, policies[1:], strict=True)
            }
            ratio = told[f"lr_{rate:g}"]["after_1"]["bytes_ratio"]
            told["bytes_ratio"] = max(told["bytes_ratio"], ratio)
    print_json(told)


if __name__ == "__main__":
    main()
