"""A trainer's metrics in TensorBoard's event files and in Weights & Biases, where set.

The child process writes them: it computes the learning metrics anyway, and neither library belongs
in the network process, which imports no torch and starts no foreign threads."""

import importlib
import math
from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from swarm.data import beside
from swarm.errors import UserError


class Known(msgspec.Struct, frozen=True):
    """What is known of devices and of metrics."""

    peak_flops: dict[str, float]
    """FLOP/s in dense bf16 by a part of the device's name; the first part that is found counts."""
    sections: dict[str, tuple[str, ...]]
    """Sections of the dashboards, and the prefixes of the metrics in each."""


KNOWN = beside(__file__, Known)
"""From `metrics.toml`."""


class Metrics:
    """Writes each step's metrics; `Metrics()` writes nothing."""

    def __init__(
        self,
        tensorboard: str = "",
        wandb: str = "",
        run: str = "",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Raises `UserError` when a library that is set is not installed, or W&B refuses."""
        self._folder = tensorboard
        self._writer: Any = None
        self._wandb: Any = None
        if tensorboard:
            self._writer_class = _library(
                "torch.utils.tensorboard", "trainer.tensorboard", "tensorboard"
            ).SummaryWriter
        if wandb:
            library = _library("wandb", "trainer.wandb", "wandb")
            name = run.rpartition("/")[2]
            try:  # a restarted trainer continues the same curves
                self._wandb = library.init(
                    project=wandb, name=name, id=name, resume="allow", config=dict(config or {})
                )
                # Its own step only rises, and it drops what a resumed trainer repeats.
                self._wandb.define_metric("*", step_metric="step")
            except library.Error as error:
                raise UserError(
                    f"trainer.wandb = {wandb!r}: {error} (with WANDB_MODE=offline in the "
                    "environment the figures stay in a folder here)"
                ) from error

    def record(self, step: int, figures: Mapping[str, Any]) -> None:
        """Write one step's finite metrics."""
        named = {
            f"{_section(name)}/{name}": float(value)
            for name, value in figures.items()
            if isinstance(value, (int, float)) and math.isfinite(value)
        }
        for environment, values in figures.get("environments", {}).items():
            named |= {f"{name}/of/{environment}": float(value) for name, value in values.items()}
        for name, share in idle_shares(figures).items():
            named[f"time/{name}"] = share
        if self._folder:
            if self._writer is None:  # overwrites what an earlier process wrote from this step on
                self._writer = self._writer_class(self._folder, purge_step=step)
            for name, value in sorted(named.items()):
                self._writer.add_scalar(name, value, step)
            self._writer.flush()
        if self._wandb is not None:
            self._wandb.log({"step": step, **named})


def idle_shares(figures: Mapping[str, Any]) -> dict[str, float]:
    """Shares of a step's time without optimiser: for rollouts, checks, saving; and their sum."""
    total = figures.get("step_seconds", 0.0)
    if total <= 0:
        return {}
    shares = {
        f"idle_{cause}_share": figures.get(f"idle_{cause}_seconds", 0.0) / total
        for cause in ("rollouts", "checks", "weights")
    }
    return {**shares, "idle_share": sum(shares.values())}


def speed(figures: Mapping[str, Any], seconds: float, peak: float = 0.0) -> dict[str, float]:
    """Seconds and tokens per second of a step, and the share of `peak` that it used (MFU).

    `figures`: the learner's, with the step's work (`learning/work.py`). It holds only what the step
    trained on, not the groups left out or skipped optimiser steps. `peak`: FLOP/s of all devices
    together; 0: unknown, and the share is left out."""
    seconds = max(1e-9, seconds)
    found = {"train_seconds": seconds, "tokens_per_second": figures["trained_tokens"] / seconds}
    if peak:
        found["model_flops_share"] = figures["model_flops"] / seconds / peak
    return found


def peak_flops(device: torch.device) -> float:
    """Peak FLOP/s of a device in bf16; 0 where unknown."""
    if device.type != "cuda":
        return 0.0
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in KNOWN.peak_flops.items() if part in name), 0.0)


def _section(name: str) -> str:
    for section, beginnings in KNOWN.sections.items():
        if name.startswith(beginnings):
            return section
    return "other"


def _library(module: str, option: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise UserError(
            f"{option} is set, but {package} is not installed here; type: pip install {package}"
        ) from error
