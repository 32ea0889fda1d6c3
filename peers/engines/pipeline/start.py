"""The pipeline that the settings ask for: stages on devices, or in other processes."""

from __future__ import annotations

from pathlib import Path

from peers.engines.device import find_device, find_dtype
from peers.engines.pipeline.channel import read_secret
from peers.engines.pipeline.engine import PipelineEngine
from peers.engines.pipeline.remote import RemoteStage
from peers.engines.pipeline.stage import LocalStage
from swarm.errors import UserError
from swarm.jobs import Hardware


def pipeline_engine(folder: Path, policy: int, hardware: Hardware) -> PipelineEngine:
    """An `EngineFactory`, for hardware with `devices` or `stages`."""
    if hardware.devices and hardware.stages:
        raise UserError("devices and stages are both set; choose one of them")
    stages: list[LocalStage | RemoteStage]
    if hardware.devices:
        stages = [LocalStage(find_device(name)) for name in hardware.devices]
        device = find_device(hardware.devices[-1])
    else:
        if not hardware.stage_secret:
            raise UserError("stages are set, but no stage_secret; give the file with their secret")
        secret = read_secret(Path(hardware.stage_secret).expanduser())
        device = find_device(hardware.device)
        stages = []
        try:
            for address in hardware.stages:
                stages.append(RemoteStage(address, secret))
        except UserError:
            for stage in stages:
                stage.close()
            raise
    return PipelineEngine(
        folder,
        stages,
        device,
        find_dtype(hardware.dtype, device),
        policy=policy,
        slots=hardware.slots,
        layers=hardware.stage_layers,
    )
