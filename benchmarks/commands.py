"""Runs commands of `swarm` for studies, as a user would, and measures the policies they write."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peers.demo.recipes import ENVIRONMENT, SAMPLING
from peers.engines.native import NativeEngine
from peers.environments import load as load_environment
from peers.trainer.child import EVALUATION_PROMPTS
from peers.trainer.evaluation import mean_reward
from swarm.manifest import EnvironmentReference, Sampling

PROGRAM = "from swarm.commands.main import main; main()"


def swarm(*arguments: object) -> list[dict[str, Any]]:
    """Run a command with --json; return the objects it prints. Raises `CalledProcessError`."""
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments), "--json"]
    text = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    decoder, found = json.JSONDecoder(), []
    while text := text.lstrip():
        told, end = decoder.raw_decode(text)
        found.append(told)
        text = text[end:]
    return found


def accuracy(
    folder: Path,
    reference: EnvironmentReference = ENVIRONMENT,
    sampling: Sampling = SAMPLING,
    prompts: int = EVALUATION_PROMPTS,
) -> float:
    """Sampled accuracy on held-out prompts; every policy gets the same ones, and the same noise."""
    environment = load_environment(reference.name, reference.version, reference.options)
    return mean_reward(NativeEngine(folder), environment, folder, sampling, prompts=prompts)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least and most, rounded."""
    figures = {"median": statistics.median(values), "least": min(values), "most": max(values)}
    return {name: round(value, 4) for name, value in figures.items()}
