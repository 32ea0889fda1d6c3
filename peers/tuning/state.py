"""The state of an interrupted fine-tuning: weights and AdamW's moments in safetensors."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import safetensors
import safetensors.torch
import torch

from swarm.errors import UserError
from swarm.jobs.offline import StartTuning

TENSORS, PROGRESS = "state.safetensors", "state.json"


def write_state(
    folder: Path, job: StartTuning, model: Any, optimiser: torch.optim.Optimizer, steps: int
) -> None:
    """Write all that the next step depends on, besides the job."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[f"weight/{name}"] = parameter.detach().cpu().contiguous()
        for key, value in optimiser.state[parameter].items():
            tensors[f"{key}/{name}"] = value.detach().cpu().contiguous()
    safetensors.torch.save_file(tensors, folder / TENSORS)
    told = {"steps": steps, "job": _digest(job)}
    (folder / PROGRESS).write_text(json.dumps(told), encoding="utf-8")


def read_state(folder: Path, job: StartTuning, model: Any, optimiser: torch.optim.Optimizer) -> int:
    """Take over a state that the same job wrote; return its steps. Raises `UserError`."""
    try:
        told = json.loads((folder / PROGRESS).read_bytes())
        if told["job"] != _digest(job):
            raise UserError(
                f"{folder} holds an interrupted tuning of another model, data or settings; give "
                "the same, choose another --out, or remove that folder to begin anew"
            )
        with safetensors.safe_open(folder / TENSORS, framework="pt") as file:
            names = set(file.keys())
            for name, parameter in model.named_parameters():
                with torch.no_grad():
                    parameter.copy_(file.get_tensor(f"weight/{name}"))
                moments = {
                    key for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}/{name}" in names
                }
                optimiser.state[parameter] = {
                    key: file.get_tensor(f"{key}/{name}").to(parameter.device) for key in moments
                }
        return int(told["steps"])
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
        raise UserError(
            f"{folder} holds no state that can be read ({error}); remove it to begin anew"
        ) from error


def _digest(job: StartTuning) -> str:
    """What a state belongs to."""
    told = msgspec.structs.replace(job, state="")
    return hashlib.sha256(msgspec.json.encode(told)).hexdigest()
