"""A demo's base policy: random weights or a model that is given, warmed up by supervised learning,
which stops early: RL then gets enough rewards to learn from, and has most of the task left."""

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from peers.calibration.calibrate import measure_run
from peers.demo.recipes import RECIPES, PreparationService, Prepare, Recipe, Warmup
from peers.engines import loading
from peers.engines import model as policy_model
from peers.engines.demo import EOS_ID, make_policy
from peers.engines.device import find_device, find_dtype
from peers.environments import Environment, Renderer, task_of
from peers.environments.collection import Environments
from peers.environments.episodes import demonstrate
from peers.learning import adapters
from peers.sandbox.launcher import start_launcher
from swarm.rollouts.seeds import digest, environment_of_group
from swarm.wire.manifest import Adapter, Thresholds
from swarm.world.progress import report
from swarm.world.tasks import JobThread, in_job_thread


class Preparation:
    """Implements `PreparationService`."""

    def __init__(self) -> None:
        self._thread = JobThread()

    @in_job_thread
    def warm_up(self, job: Prepare) -> int:
        folder, model = Path(job.folder), Path(job.model) if job.model else None
        return prepare_base(folder, job.seed, job.recipe, model)

    @in_job_thread
    def calibrate(self, job: Prepare) -> Thresholds:
        device = find_device("auto")
        dtype = str(find_dtype("fastest", device)).removeprefix(
            "torch."
        )  # as workers and validators
        environments = Environments(job.recipe.environments)
        found = measure_run(
            Path(job.folder),
            [environments.of(each) for each in job.recipe.environments],
            job.recipe.sampling,
            [f"{dtype}:{device}"],
            lambda _line: report(),
            lambda _done, _all: report(),
        )
        return found.thresholds


_SERVICE: type[PreparationService] = Preparation


def open_preparation() -> Preparation:
    start_launcher()
    return Preparation()


def prepare_base(
    folder: Path, seed: int, recipe: Recipe = RECIPES["sort-digits"], model: Path | None = None
) -> int:
    """Make a demo's base policy in `folder`, of the weights in the folder `model` or of random
    ones; returns the steps of its warm-up."""
    if model is None:
        make_policy(folder, seed, recipe.positions)
    environments = Environments(recipe.environments)
    assert recipe.warmup is not None
    return warm_up(
        folder,
        [environments.of(reference) for reference in recipe.environments],
        seed,
        recipe.warmup,
        recipe.adapter,
        weights=[reference.weight for reference in recipe.environments],
        begin=model,
        stop=recipe.sampling.stop_ids[0],
        temperature=recipe.sampling.temperature,
    )


def warm_up(
    folder: Path,
    environments: Sequence[Environment],
    seed: int,
    recipe: Warmup | None = None,
    adapter: Adapter | None = None,
    *,
    weights: Sequence[float] = (1.0,),
    begin: Path | None = None,
    stop: int = EOS_ID,
    temperature: float = 1.0,
) -> int:
    """Train the policy in `folder`, in place, on episodes with full reward; return the steps.

    A step's loss also gives the probability of its prompts' answers before the step learned them,
    the expected accuracy of sampling, so the stopping rule needs no generation.

    `adapter`: what is trained, and then merged into the weights; by default all of them are.
    `weights`: the environments' shares of the prompts. `begin`: another folder with the policy."""
    recipe, adapter = recipe or Warmup(), adapter or Adapter()
    begin = begin or folder
    renderer = Renderer(begin)
    model: Any = loading.load(begin).train()
    stored, device = model.dtype, find_device("auto" if adapter.rank else "cpu")
    # Where the hardware has products in bf16, a large model takes a third less time with them; the
    # master weights stay in fp32. Where it has none, they take fifty times as long.
    half = bool(adapter.rank) and find_dtype("fastest", device) is torch.bfloat16
    if adapter.rank:
        model = model.float()
        adapters.adapt(model, adapter)
        for name, value in model.named_parameters():
            if value.requires_grad:
                value.data.copy_(adapters.initial(name, value.shape, seed))
        model = model.to(device)
    optimiser = torch.optim.AdamW(
        [each for each in model.parameters() if each.requires_grad],
        lr=recipe.learning_rate,
        fused=True,
    )
    recent: deque[float] = deque(maxlen=recipe.window)
    for step in range(recipe.steps_max):
        report()
        optimiser.param_groups[0]["lr"] = recipe.learning_rate * min(
            1.0, (step + 1) / recipe.warmup_steps
        )
        rows = _batch(environments, renderer, seed, step, recipe.batch, weights, stop)
        tokens, labels = (each.to(device) for each in rows)
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            logits = model(tokens[:, :-1], use_cache=False).logits.float()
        targets = labels[:, 1:]
        surprise = _surprise(logits, targets)  # [batch, seq - 1]
        optimiser.zero_grad()
        loss = surprise.sum() / (targets >= 0).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        with torch.no_grad():
            sampled = surprise if temperature == 1 else _surprise(logits / temperature, targets)
            recent.append(sampled.sum(-1).neg().exp().mean().item())
        if len(recent) == recipe.window and sum(recent) / recipe.window >= recipe.accuracy:
            break
    if adapter.rank:
        model = _merged(model).to("cpu", stored)
    policy_model.save(model, folder, tokenizer_from=begin)
    return step + 1


def _surprise(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """−log of each target's probability, fp32 [batch, seq]; 0 where there is no loss."""
    return functional.cross_entropy(
        logits.transpose(1, 2), targets, ignore_index=-100, reduction="none"
    )


@torch.no_grad()
def _merged(model: Any) -> Any:
    """The model with its adapters as parts of its weights."""
    for name, adapted in list(model.named_modules()):
        if isinstance(adapted, adapters.AdaptedLinear):
            rows, columns = adapted.weight.shape
            plain = torch.nn.Linear(columns, rows, bias=adapted.bias is not None, device="meta")
            change = adapted.scale * (adapted.lora_b @ adapted.lora_a)
            plain.weight, plain.bias = adapted.weight, adapted.bias
            plain.weight.add_(change)
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, plain)
    return model


def _batch(
    environments: Sequence[Environment],
    renderer: Renderer,
    seed: int,
    step: int,
    batch: int,
    weights: Sequence[float],
    stop: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, labels), int64 [batch, seq], of whole episodes. Labels without loss are −100."""
    rows, labels = [], []
    for index in range(batch):
        parts = seed.to_bytes(8, "big"), (step * batch + index).to_bytes(8, "big")
        drawn = digest("swarm/1/sft", *parts)
        environment = environments[environment_of_group(drawn, 0, weights)]
        task = task_of(environment, drawn)
        ends = None if isinstance(task.prompt, str) else renderer.turn_end(task.prompt)
        segments = demonstrate(environment, task, renderer, stop if ends is None else ends)
        rows.append(torch.tensor([token for segment in segments for token in segment.tokens]))
        labels.append(
            torch.tensor(
                [
                    token if segment.kind == "model" else -100
                    for segment in segments
                    for token in segment.tokens
                ]
            )
        )
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, batch_first=True), pad(labels, batch_first=True, padding_value=-100)
