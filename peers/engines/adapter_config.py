"""What a folder with a LoRA adapter says of it, read and checked. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peers.engines.config import read_object
from swarm.errors import UserError
from swarm.shardcast.manifest import BASE_NAME
from swarm.wire.manifest import ADAPTER_RANK_MAX, ADAPTER_TARGETS

CONFIG_FILE = "adapter_config.json"
CONFIG_BYTES_MAX = 1 << 20

INERT = frozenset(
    (
        *("peft_type", "task_type", "peft_version", "revision", "auto_mapping", "inference_mode"),
        *("base_model_name_or_path", "r", "lora_alpha", "lora_dropout", "target_modules"),
        *("exclude_modules", "layers_to_transform", "layers_pattern", "init_lora_weights"),
        *("megatron_core", "qalora_group_size", "eva_config", "ensure_weight_tying"),
    )
)
"""Options of peft that are read elsewhere, or that change nothing about an adapter with a matrix
for every target. Any other must have one of the values in `OFF`: it makes another kind of adapter,
which today's peft or a later one computes differently."""

OFF: tuple[Any, ...] = (None, False, "none", {}, [])

PLAIN_STARTS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Values of `init_lora_weights` that leave the base as it is. PiSSA, OLoRA, CorDA and LoftQ train
beside a changed base, which is not in the adapter's folder."""


@dataclass(frozen=True)
class AdapterConfig:
    """What `adapter_config.json` says."""

    rank: int
    scale: float
    """alpha / rank."""
    targets: frozenset[str]
    base: str
    """The name or folder of the base."""


def is_adapter(folder: Path) -> bool:
    """Whether a policy's folder holds an adapter instead of weights."""
    return (folder / CONFIG_FILE).exists()


def base_of(folder: Path) -> Path:
    """The folder with the weights that a policy begins with: its own, unless it is an adapter.

    Of an adapter from the network it is the base that was fetched with it; of any other, the
    folder that its config names. Raises `UserError` if that folder is missing."""
    if not is_adapter(folder):
        return folder
    link = folder / BASE_NAME
    try:
        name = link.read_text() if link.exists() else read_adapter_config(folder).base
    except UnicodeDecodeError as error:
        raise UserError(
            f"{link} is not text; delete it to use base_model_name_or_path in {CONFIG_FILE}"
        ) from error
    base = folder / name
    try:
        is_whole = (base / "config.json").exists() and not is_adapter(base)
    except (OSError, ValueError):  # no path at all
        is_whole = False
    if not is_whole:
        raise UserError(
            f"{folder} holds an adapter, and its base {name[:200]} is no folder with a whole "
            f"model; put the base's folder into base_model_name_or_path in {CONFIG_FILE}"
        )
    return base


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read and check `adapter_config.json`; raises `UserError`."""
    path = folder / CONFIG_FILE
    found = read_object(path, "adapter", CONFIG_BYTES_MAX)
    if found.get("peft_type") != "LORA":
        raise UserError(f"{path}: peft_type is {found.get('peft_type')!r:.60}; it must be 'LORA'")
    for name in sorted(found.keys() - INERT):
        if found[name] not in OFF:
            raise UserError(
                f"{path}: {name[:60]} is {found[name]!r:.60}, which changes what the adapter "
                "computes and is not supported; train it without"
            )
    start = found.get("init_lora_weights")
    if start not in PLAIN_STARTS:
        raise UserError(
            f"{path}: init_lora_weights is {start!r:.60}, so the adapter belongs to a base that "
            "its training changed; save it with peft's path_initial_model_for_weight_conversion, "
            "which makes a plain LoRA of it, and set init_lora_weights to true"
        )
    return _checked(found, path)


def _checked(found: Mapping[str, Any], path: Path) -> AdapterConfig:
    rank, alpha = found.get("r"), found.get("lora_alpha")
    if type(rank) is not int or not 1 <= rank <= ADAPTER_RANK_MAX:
        raise UserError(f"{path}: r is {rank!r:.60}; it must be 1 to {ADAPTER_RANK_MAX}")
    if type(alpha) not in (int, float) or not 0 < alpha <= 1e6:  # type: ignore[operator]
        raise UserError(f"{path}: lora_alpha is {alpha!r:.60}; it must be above 0, at most 1e6")
    targets = found.get("target_modules")
    unknown = [
        name
        for name in (targets if isinstance(targets, list) else [targets])
        if name not in ADAPTER_TARGETS
    ]
    if unknown or not targets:
        raise UserError(
            f"{path}: target_modules names {unknown[0] if unknown else targets!r:.60}; there are: "
            + ", ".join(ADAPTER_TARGETS)
        )
    assert isinstance(targets, list) and isinstance(alpha, int | float)
    base = found.get("base_model_name_or_path")
    return AdapterConfig(rank, alpha / rank, frozenset(targets), str(base or "")[:4096])
