"""Reading the files of `deploy/`: the commands they start, and the time they allow for leaving."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd/swarm@.service"

Command = tuple[str, list[str]]
"""Where a command stands, and its words, from `swarm` or `torchrun` on."""


def documents(path: Path) -> list[dict[str, Any]]:
    """The YAML documents of a file."""
    return [each for each in yaml.safe_load_all(path.read_text(encoding="utf-8")) if each]


def compose() -> dict[str, Any]:
    services: dict[str, Any] = documents(DEPLOY / "compose.yaml")[0]["services"]
    return services


def workloads() -> dict[str, dict[str, Any]]:
    """The manifests with pods, by their names: overlays change some values of them."""
    return {
        each["metadata"]["name"]: each
        for path in sorted((DEPLOY / "kubernetes/base").glob("*.yaml"))
        for each in documents(path)
        if each["kind"] in ("StatefulSet", "Job")
    }


def containers(workload: dict[str, Any]) -> list[dict[str, Any]]:
    pod = workload["spec"]["template"]["spec"]
    return [*pod.get("initContainers", []), *pod["containers"]]


def commands() -> Iterator[Command]:
    """Every command of the program that the files start."""
    for name, service in compose().items():
        # Compose puts the value of `${NAME:?…}` in its place.
        yield (
            f"compose {name}",
            shlex.split(re.sub(r"\$\{\w+:\?[^}]*\}", "VALUE", service["command"])),
        )
    for name, workload in workloads().items():
        for container in containers(workload):
            if "args" in container:
                yield f"kubernetes {name}", container["args"]
    pod = documents(DEPLOY / "kubernetes/base/probes.yaml")[0]["spec"]["template"]["spec"]
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        yield f"kubernetes {kind}", pod["containers"][0][kind]["exec"]["command"]
    for path in sorted((DEPLOY / "slurm").glob("*.sbatch")):
        script = path.read_text(encoding="utf-8").replace("\\\n", " ")
        for found in re.findall(r"^(?:exec srun \S+ )?((?:swarm|torchrun) .*?)&?$", script, re.M):
            yield f"slurm {path.name}", shlex.split(found)
    started = re.search(r"^ExecStart=\S+/(swarm .*)$", UNIT.read_text(encoding="utf-8"), re.M)
    assert started is not None
    yield "systemd", shlex.split(started[1])
    image = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    for found in re.findall(r"^(?:    )?CMD (\[.*\])$", image, re.M):
        yield "image", json.loads(found)


def grace_seconds() -> dict[str, float]:
    """Seconds between SIGTERM and SIGKILL, by the file that sets them."""
    found = {
        f"compose {name}": float(service["stop_grace_period"].removesuffix("s"))
        for name, service in compose().items()
    }
    pod = documents(DEPLOY / "kubernetes/base/pod.yaml")[0]["spec"]["template"]["spec"]
    found["kubernetes"] = pod["terminationGracePeriodSeconds"]
    unit = UNIT.read_text(encoding="utf-8")
    found["systemd"] = float(re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.M)[0])
    for path in sorted((DEPLOY / "slurm").glob("*.sbatch")):
        script = path.read_text(encoding="utf-8")
        found[path.name] = float(re.findall(r"--signal=(?:B:)?TERM@(\d+)$", script, re.M)[0])
    return found
