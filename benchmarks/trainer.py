"""One full GRPO step of the trainer against TRL's GRPOTrainer, on the same fixed completions.

    pip install --target /somewhere/trl --no-deps trl==1.16.0 accelerate datasets pandas dill \
        multiprocess xxhash psutil fsspec python-dateutil six peft
    python -m benchmarks.trainer --trl /somewhere/trl --model SmolLM2-135M-Instruct --repeats 3
    python -m benchmarks.trainer --trl /somewhere/trl --model SmolLM2-135M-Instruct --rank 16

Prints one JSON object. A step is: log μ under the generating policy, forward, backward, gradient
clipping, AdamW. Both trainers get the same policy and the same generating policy (μ ≠ π), prompts
of 16 tokens, completions log-uniform between 16 and 512 tokens, δ = 4, no KL, no filter, A = reward
− group mean, fp32, sdpa, one thread. TRL uses its `dapo` aggregation and no logging. TRL accepts no
other generating policy, so its own no-gradient pass runs with that policy's weights. The learning
rate is 0, so that every step is the same. Each trainer runs in a process of its own. Times are CPU
seconds, which other processes disturb least: the median, minimum and maximum of `--repeats` steps.
Memory is a process's growth during its steps.
Without --trl only this trainer is measured. `--rank` trains adapters of all linear layers, by peft
on TRL's side: μ is the model, and π has the same adapters on both sides, which change it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.common import spread
from benchmarks.groups import Group, as_accepted
from peers.learning.learner import Learner
from peers.learning.settings import LearnerSettings
from swarm.rollouts.rollout import Rollout
from swarm.terminal.output import print_json
from swarm.wire.manifest import Adapter, Objective, Optimiser, Schedule

GROUP_SIZE = 8
PROMPT_TOKENS = 16
VOCABULARY = 4096
"""Token ids are drawn below this."""
LENGTHS = (16, 512)
CLIP = 1e9
"""Norm limit that is never reached: gradients must not be clipped to be comparable."""
OBJECTIVE = Objective(kl_coefficient=0, entropy_coefficient=0, normalise_by_std=False)
OPTIMISER = Optimiser(gradient_norm_max=CLIP, learning_rate=0.0, warmup_steps=0)
"""An optimiser with learning rate 0, so that every step is the same."""
GROUPS = 2
CHANGE = 0.02
"""Noise on the weights between μ and π, relative to their spread: enough for clipping to act."""


def make_policies(model: Path, folder: Path) -> int:
    """Write the model as μ to `folder`/mu and π to `folder`/pi; return the number of parameters."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for name in ("mu", "pi"):
        shutil.copytree(model, folder / name)
        loaded.save_pretrained(folder / name)
        _change(loaded)
    return sum(parameter.numel() for parameter in loaded.parameters())


@torch.no_grad()
def _change(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.add_(torch.randn_like(parameter) * parameter.std() * CHANGE)


@torch.no_grad()
def fill_adapters(model: Any) -> None:
    """Give π's adapters their values, which a matrix's name decides."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            own = torch.Generator().manual_seed(zlib.crc32(plain_name(name).encode()))
            parameter.copy_(torch.randn(parameter.shape, generator=own) * CHANGE)


def plain_name(name: str) -> str:
    """This trainer's name of a parameter that peft may have renamed."""
    name = name.removeprefix("base_model.model.")
    return re.sub(r"lora_([AB])\.default\.weight", lambda found: f"lora_{found[1].lower()}", name)


def make_groups() -> list[Group]:
    """The fixed completions and their rewards."""
    generator = torch.Generator().manual_seed(1)

    def draw(count: int) -> list[int]:
        return torch.randint(4, VOCABULARY, (count,), generator=generator).tolist()

    low, high = LENGTHS
    groups = []
    for _ in range(GROUPS):
        places = torch.rand(GROUP_SIZE, generator=generator).tolist()
        lengths = [round(low * math.exp(place * math.log(high / low))) for place in places]
        prompt = draw(PROMPT_TOKENS)
        groups.append(
            Group(
                [Rollout.single_turn(prompt, draw(length)) for length in lengths],
                rewards=torch.rand(GROUP_SIZE, generator=generator).tolist(),
                policy=0,
            )
        )
    return groups


class Meter:
    """Measures the CPU seconds of every step, and the process's growth from construction on."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        Path("/proc/self/clear_refs").write_text("5")  # reset the peak
        self._before = _memory("VmRSS")
        self._began = 0.0

    def begin(self) -> None:
        self._began = time.process_time()

    def end(self) -> None:
        self.seconds.append(time.process_time() - self._began)

    def figures(self) -> dict[str, float]:
        """Median and spread of the steps' seconds, and peak memory."""
        peak_bytes = _memory("VmHWM") - self._before
        return {**spread("seconds_per_step", self.seconds, digits=6), "peak_bytes": peak_bytes}


def _memory(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {field}")


def run_ours(folder: Path, repeats: int, rank: int) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Figures and gradients of this trainer."""
    schedule = Schedule(steps=100, groups_per_step=GROUPS, max_staleness=2)
    adapter = Adapter(rank=rank, alpha=2.0 * rank)
    learner = Learner(
        folder / "mu", LearnerSettings(OBJECTIVE, schedule, optimiser=OPTIMISER, adapter=adapter)
    )
    pi = load_file(folder / "pi" / "model.safetensors")
    if rank:
        fill_adapters(learner.model)
        pi = {}
    with torch.no_grad():
        for name, parameter in learner.model.named_parameters():
            if name in pi:
                parameter.copy_(pi[name])
    meter, groups = Meter(), as_accepted(make_groups())
    for _ in range(repeats):
        learner.step = 1  # policy 0 is μ, the weights stay π
        meter.begin()
        metrics = learner.train_step(groups, 1)
        meter.end()
    named = learner.model.named_parameters()
    gradients = {name: value.grad for name, value in named if value.grad is not None}
    told = {name: metrics[name] for name in ("loss", "ratio_std")}
    return {**meter.figures(), **told}, gradients


def recorded(groups: Sequence[Group]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Functions that hand TRL's trainer recorded rollouts and rewards; a prompt is an index."""

    def give(prompts: list[str], trainer: Any) -> dict[str, Any]:
        chosen = [groups[int(prompt)] for prompt in prompts]
        rollouts = [g.rollouts[index % GROUP_SIZE] for index, g in enumerate(chosen)]
        completions = [rollout.model_tokens for rollout in rollouts]
        return {
            "prompt_ids": [list(rollout.prompt) for rollout in rollouts],
            "completion_ids": completions,
            "logprobs": [[0.0] * len(completion) for completion in completions],
        }

    def reward(prompts: list[str], **_: Any) -> list[float]:
        return [
            groups[int(prompt)].rewards[place % GROUP_SIZE] for place, prompt in enumerate(prompts)
        ]

    return give, reward


def trl_config(output: str, repeats: int, rows: int) -> Any:
    """Settings with which TRL takes the same step."""
    from trl import GRPOConfig

    passes = GROUPS * GROUP_SIZE // rows
    return GRPOConfig(
        output_dir=output,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=passes,
        steps_per_generation=passes,
        num_iterations=2,  # else TRL assumes that the old policy is π
        num_generations=GROUP_SIZE,
        max_completion_length=LENGTHS[1],
        max_steps=2 * repeats - 1,
        shuffle_dataset=False,
        loss_type="dapo",
        delta=4.0,
        epsilon=0.2,
        beta=0.0,
        scale_rewards="none",
        learning_rate=0.0,
        max_grad_norm=CLIP,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def run_trl(
    folder: Path, repeats: int, rows: int, rank: int
) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Figures and gradients of TRL's trainer, with `rows` completions per forward pass."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from transformers.utils import logging
    from trl import GRPOTrainer
    from trl.trainer.grpo_trainer import add_fused_lm_head

    logging.disable_progress_bar()
    give, reward = recorded(make_groups())
    meter: list[Meter] = []
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}

    class Fixed(GRPOTrainer):  # type: ignore[misc]
        """Uses the generating policy for passes without gradient."""

        older: Any = None

        def _get_per_token_logps_and_entropies(self, model: Any, *rest: Any, **more: Any) -> Any:
            chosen = model if torch.is_grad_enabled() else self.older
            return super()._get_per_token_logps_and_entropies(chosen, *rest, **more)

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            value = super()._compute_loss(model, inputs)
            losses.append(float(value.detach()))
            return value

    class Watch(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            losses.clear()
            meter[0].begin()

        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    gradients[plain_name(name)] = parameter.grad.clone()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            meter[0].end()

    adapter = None
    if rank:
        from peft import LoraConfig

        adapter = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    with tempfile.TemporaryDirectory() as output:
        trainer = Fixed(
            peft_config=adapter,
            model=AutoModelForCausalLM.from_pretrained(
                folder / ("mu" if rank else "pi"), dtype="float32"
            ),
            args=trl_config(output, repeats, rows),
            train_dataset=Dataset.from_list([{"prompt": str(n)} for n in range(GROUPS)]),
            reward_funcs=reward,
            rollout_func=give,
            processing_class=AutoTokenizer.from_pretrained(folder / "pi"),
            callbacks=[Watch()],
        )
        if rank:
            fill_adapters(trainer.model)
        # Prepared as TRL prepares its reference model.
        trainer.older = AutoModelForCausalLM.from_pretrained(folder / "mu", dtype="float32")
        add_fused_lm_head(trainer.older, temperature=trainer.temperature)
        meter.append(Meter())
        trainer.train()
    # Every second step reuses the previous completions and old log-probabilities: half a step.
    meter[0].seconds = meter[0].seconds[::2]
    return {**meter[0].figures(), "loss": sum(losses)}, gradients


def measure(arguments: Sequence[str]) -> dict[str, float]:
    """Measure one trainer in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.trainer", *arguments],
        stdout=subprocess.PIPE,
        check=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"},
    )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def compare(given: argparse.Namespace) -> dict[str, Any]:
    """Compare both trainers."""
    trl = given.trl
    with tempfile.TemporaryDirectory() as folder:
        result: dict[str, Any] = {"parameters": make_policies(given.model, Path(folder))}
        tokens = sum(len(r.model_tokens) for group in make_groups() for r in group.rollouts)
        result["completion_tokens"] = tokens
        common = [f"--model={given.model}", f"--folder={folder}", f"--rank={given.rank}"]
        common += [f"--repeats={given.repeats}", f"--rows={given.rows}"]
        sides = ["swarm"] if trl is None else ["swarm", "trl"]
        for side in sides:
            more = [] if trl is None else [f"--trl={trl}"]
            figures = measure([f"--side={side}", *common, *more])
            figures["tokens_per_second"] = tokens / figures["seconds_per_step"]
            result[side] = figures
        if trl is not None:
            ours, theirs = (load_file(Path(folder) / f"{side}.safetensors") for side in sides)
            result["speedup_over_trl"] = (
                result["trl"]["seconds_per_step"] / result["swarm"]["seconds_per_step"]
            )
            result["memory_over_trl"] = result["swarm"]["peak_bytes"] / result["trl"]["peak_bytes"]
            result["loss_difference"] = abs(result["swarm"]["loss"] - result["trl"]["loss"])
            result["gradient_difference"] = max(
                float((ours[name] - theirs[name]).abs().max()) for name in theirs
            )
            result["gradient_largest"] = max(float(each.abs().max()) for each in theirs.values())
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trl", type=Path, help="folder with trl 1.16.0 and what it needs")
    parser.add_argument("--model", type=Path, required=True, help="a folder")
    parser.add_argument("--rank", type=int, default=0, help="train adapters of this rank")
    parser.add_argument("--repeats", type=int, default=5, help="steps, whose median counts")
    parser.add_argument(
        "--rows", type=int, default=8, help="completions in a forward pass of TRL's"
    )
    parser.add_argument("--side", choices=["swarm", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.side is not None:
        if given.side == "swarm":
            figures, gradients = run_ours(given.folder, given.repeats, given.rank)
        else:
            sys.path.append(str(given.trl))
            figures, gradients = run_trl(given.folder, given.repeats, given.rows, given.rank)
        save_file(gradients, given.folder / f"{given.side}.safetensors")
        print(json.dumps(figures))
        return
    print_json(compare(given))


if __name__ == "__main__":
    main()
