"""Checks of what computes: the engine, its environment, GPU and driver, memory for the policy."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from subprocess import DEVNULL

import trio

from peers.engines.installed import interpreter_for
from peers.inference.preflight import Work, disk, machine
from peers.inference.role import InferenceRole
from peers.inference.settings import InferenceSettings
from swarm.app.doctor.machine import existing
from swarm.errors import UserError
from swarm.findings import Finding, attempt, within
from swarm.jobs.inference import InferenceService, InferenceSetup, Survey
from swarm.manifest import EnvironmentReference
from swarm.roles import load_role
from swarm.settings import ComputeSettings, PeerSettings, RoleSettings
from swarm.terminal.extras import EXTRA_OF_ROLE, require_extra
from swarm.world import client
from swarm.world.compute import LocalCompute

PYTHON_SECONDS = 10.0
"""Deadline for an interpreter to start."""

SURVEY_SECONDS = 60.0
"""Deadline for a child to load PyTorch and look at the device; usually 3 to 5 s."""

INFERENCE = "inference"


def engine_environment(settings: PeerSettings) -> Finding:
    """Whether the engine that the settings name is installed, and in which environment."""

    def check() -> str:
        interpreter = _interpreter(settings, INFERENCE)
        if interpreter is None:
            return f"{settings.engine}, in this peer's own environment"
        return f"{settings.engine}, run by {interpreter}"

    return attempt("engine", check)


def _own(settings: PeerSettings, role: str) -> ComputeSettings | None:
    """The settings of a role that computes; None for another."""
    table = settings.of(role, getattr(load_role(role), "Settings", RoleSettings))
    return table if isinstance(table, ComputeSettings) else None


def _interpreter(settings: PeerSettings, role: str) -> str | None:
    """The Python of the role's children; None: the peer's own. Raises `UserError`."""
    own = _own(settings, role)
    if own is None:
        return None
    if isinstance(own, InferenceSettings):
        return interpreter_for(settings.engine, settings.home_path, own.interpreter, own.device)
    return own.interpreter or None


async def compute_findings(settings: PeerSettings, work: Work | None) -> list[Finding]:
    """What the children of this peer's roles find, and whether the run's policy fits in."""
    found: list[Finding] = []
    for role in settings.role:
        if role in EXTRA_OF_ROLE and not any(each.problem for each in found):
            found += await _role_findings(settings, role, work)
    if found and work is not None:
        free = shutil.disk_usage(existing(settings.home_path)).free
        found.append(replace(disk(settings, free, work), topic="space"))
    return found


async def _role_findings(settings: PeerSettings, role: str, work: Work | None) -> list[Finding]:
    found: list[Finding] = []
    try:
        interpreter = _interpreter(settings, role)
    except UserError as error:
        return [Finding("engine", str(error), {}, problem=True)]
    if interpreter is not None:
        answers = await within(
            PYTHON_SECONDS, "python", partial(_python_answers, interpreter), problem=True
        )
        found.append(answers)
        if answers.problem:
            return found

    async def survey() -> Finding:
        own = _own(settings, role)
        assert own is not None
        setup = InferenceSetup(
            engine=settings.engine if role == INFERENCE else "native",
            hardware=own.hardware,
            environments=[],
            tokens_max=1024,
        )
        async with LocalCompute().child(
            InferenceRole.service, setup, name="engine", interpreter=interpreter
        ) as child:
            surveyed = await client(InferenceService, child).survey(Survey())
        *others, last = machine(surveyed, work)
        if role == "trainer":
            advice = "training takes several times as much; type: swarm trainer plan --model …"
            last = replace(last, text=f"{last.text}; {advice}")
        found.extend(others)
        return last

    found.append(await within(SURVEY_SECONDS, "engine", survey, problem=True))
    return found


async def _python_answers(interpreter: str) -> Finding:
    """Start an interpreter; raises `UserError` if it does not answer."""
    program = "import platform; print(platform.python_version())"
    try:
        ended = await trio.run_process(
            [interpreter, "-c", program],
            stdin=DEVNULL,
            capture_stdout=True,
            stderr=DEVNULL,
            check=False,
        )
        why = f"status {ended.returncode}"
    except OSError as error:
        ended, why = None, str(error.strerror)
    if ended is None or ended.returncode:
        raise UserError(
            f"the interpreter {interpreter} does not work ({why}); give the path of a Python, or "
            "install the engine again"
        )
    version = ended.stdout.decode("utf-8", "replace").strip()
    return Finding("python", f"{version} at {interpreter}", {"version": version})


def task_of(wanted: EnvironmentReference, allowed: Collection[str] = ()) -> Finding:
    """Whether an environment is installed in the version that a run wants."""

    def check() -> str:
        require_extra("infer", "rendering the run's tasks")
        from peers.environments.registry import load_named

        load_named(wanted, allowed)
        return f"{wanted.name} {wanted.version} is installed, as the run wants it"

    return attempt("tasks", check)
