"""What an inference peer's child finds on its machine before a policy is fetched."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch

from peers.engines.device import (
    available_bytes,
    driver_of,
    find_device,
    find_dtype,
    title_of,
    unused_gpu,
)
from peers.engines.installed import NATIVE
from swarm.jobs.inference import InferenceSetup, Surveyed
from swarm.version import __version__


def survey(setup: InferenceSetup) -> Surveyed:
    """Report engine and device; raises `UserError` for a device that this machine lacks."""
    device = find_device(setup.hardware.device)
    return Surveyed(
        engine=setup.engine,
        engine_version=_version_of(setup.engine),
        torch_version=str(torch.__version__),
        device=str(device),
        device_title=title_of(device),
        driver=driver_of(device),
        dtype=str(find_dtype(setup.hardware.dtype, device)).removeprefix("torch."),
        threads=torch.get_num_threads(),
        free_bytes=available_bytes(device),
        unused_gpu=unused_gpu(device) if setup.hardware.device == "auto" else "",
    )


def _version_of(engine: str) -> str:
    """The engine's version; empty for an engine whose package has another name."""
    if engine == NATIVE:
        return __version__
    for name in (engine, f"{engine}-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""
