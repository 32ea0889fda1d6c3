"""The checks of `swarm preflight`: the machine, and the run if its network is known."""

from __future__ import annotations

import shutil
from pathlib import Path

from blake3 import blake3

from peers.engines.installed import interpreter_for
from peers.inference.preflight import Work, examine, room
from peers.inference.role import InferenceRole
from peers.inference.settings import InferenceSettings
from swarm.app.doctor.machine import check_home, existing
from swarm.app.local_node import visit
from swarm.app.onlooker import status_of
from swarm.findings import Finding
from swarm.jobs import Load
from swarm.jobs.inference import InferenceService, InferenceSetup, Loaded, Probe, Survey, Surveyed
from swarm.manifest import EnvironmentReference
from swarm.messages import CheckpointReference
from swarm.settings import PeerSettings
from swarm.terminal.extras import EXTRA_OF_ROLE, require_extra
from swarm.world import client
from swarm.world.compute import LocalCompute

UNKNOWN = CheckpointReference(lineage=0, step=0, digest=bytes(32), size_bytes=1)
"""Stands for a policy in a folder, which no trainer has announced."""


async def look(settings: PeerSettings, model: Path | None) -> list[Finding]:
    """Survey this machine as the peer with these settings would, and look at its run.

    With `model`, an absolute path, loads that policy and renders the environments' probe tasks.
    Raises `UserError` for what would end the peer.
    """
    name = "inference"
    if name in EXTRA_OF_ROLE:
        require_extra(EXTRA_OF_ROLE[name], "swarm preflight")
    own = settings.of(name, InferenceSettings)
    interpreter = interpreter_for(settings.engine, settings.home_path, own.interpreter, own.device)
    work = await _look_at_run(settings) if settings.bootstrap else None
    environments = work.run.manifest.environments if work else []
    setup = InferenceSetup(
        engine=settings.engine,
        hardware=own.hardware,
        environments=environments,
        allowed=tuple(settings.allowed),
        tokens_max=work.run.manifest.sampling.max_new_tokens if work else 1024,
    )
    probes: list[Finding] = []
    loaded: Loaded | None = None
    async with LocalCompute().child(
        InferenceRole.service, setup, name="engine", interpreter=interpreter
    ) as child:
        engine = client(InferenceService, child)
        surveyed: Surveyed = await engine.survey(Survey())
        if model is not None:
            loaded = await engine.load(Load(policy=UNKNOWN, folder=str(model)))
            if work is not None and _has_tokenizer(model, work):
                probes = [await _probe(engine, each) for each in environments]
    free = shutil.disk_usage(existing(settings.home_path)).free
    findings = examine(settings, surveyed, free, work=work)
    findings += check_home(settings.home_path)
    return [*findings, *([room(loaded)] if loaded else []), *probes]


async def _look_at_run(settings: PeerSettings) -> Work:
    async with visit(settings.bootstrap, settings.run, looks_on=True) as (node, run):
        status = await status_of(node, run)
        return Work(status.run, status.checkpoint, status.order)


def _has_tokenizer(model: Path, work: Work) -> bool:
    path = model / "tokenizer.json"
    return path.exists() and blake3(path.read_bytes()).digest() == (
        work.run.manifest.tokenizer_hash
    )


async def _probe(engine: InferenceService, environment: EnvironmentReference) -> Finding:
    probed = await engine.probe(Probe(environment=environment))
    alike = probed.digest == environment.probe_hash
    text = f"{environment.name} {environment.version}: " + (
        "tasks are rendered as the run's owner renders them"
        if alike
        else "tasks are rendered differently from the run's owner; install the version of Swarm "
        "that the run uses, and use a policy with the run's tokenizer and chat template"
    )
    return Finding("tasks", text, {"rendered_alike": alike}, problem=not alike)
