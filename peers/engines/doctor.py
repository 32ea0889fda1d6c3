"""What the children that compute find: engine, interpreter, GPU and driver, memory for the policy.

A role's `doctor` calls this, for `swarm doctor` and for the start of a peer. Imports no torch."""

from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import trio
from blake3 import blake3

from peers.engines.config import ITEM_BYTES
from peers.engines.installed import NATIVE
from peers.models.find import find_model
from swarm.errors import UserError
from swarm.jobs import Load
from swarm.jobs.inference import InferenceService, InferenceSetup, Loaded, Probe, Surveyed
from swarm.run.findings import Finding, Work, attempt, within
from swarm.settings import ComputeSettings, PeerSettings
from swarm.terminal.extras import require_extra
from swarm.terminal.figures import readable_bytes
from swarm.terminal.untrusted import printable
from swarm.wire.manifest import EnvironmentReference
from swarm.wire.messages import CheckpointReference
from swarm.world import client
from swarm.world.compute import LocalCompute

SERVICE = "peers.engines.service:EngineService"
"""The service that can survey a machine, for every role that computes."""

PYTHON_SECONDS = 10.0
"""Deadline for an interpreter to start."""

SURVEY_SECONDS = 60.0
"""Deadline for a child to load PyTorch and look at the device; usually 3 to 5 s."""

LOAD_SECONDS = 600.0
"""Deadline for loading a policy as well."""

UNKNOWN = CheckpointReference(lineage=0, step=0, digest=bytes(32), size_bytes=1)
"""Stands for a policy in a folder, which no trainer has announced."""


async def compute_findings(
    own: ComputeSettings,
    work: Work | None,
    *,
    engine: str = NATIVE,
    interpreter: str | None = None,
    model: str | None = None,
    allowed: Sequence[str] = (),
) -> list[Finding]:
    """Start the engine's child as a role with the settings `own` would, and ask what it finds.

    `interpreter`: the child's Python; None: this process's. With `model`, in any form of
    `find_model`, the child loads that policy and renders the probe tasks of the run's
    environments, of which the user of this machine has `allowed` some."""
    found: list[Finding] = []
    if interpreter is not None:
        answers = await within(
            PYTHON_SECONDS, "python", partial(_python_answers, interpreter), problem=True
        )
        found.append(answers)
        if answers.problem:
            return found
    folder: Path | None = None
    if model is not None:
        try:  # a thread, since it may be downloaded
            folder = await trio.to_thread.run_sync(_folder_of, model, abandon_on_cancel=True)
        except UserError as error:
            found.append(Finding("model", str(error), {}, problem=True))
    environments = work.run.manifest.environments if work and folder else []
    setup = InferenceSetup(
        engine=engine,
        hardware=own.hardware.in_run(work.run.manifest.thresholds.measured_dtypes if work else []),
        environments=environments,
        allowed=tuple(allowed),
        tokens_max=work.run.manifest.sampling.max_new_tokens if work else 1024,
    )

    async def survey() -> Finding:
        async with LocalCompute().child(
            SERVICE, setup, name="engine", interpreter=interpreter
        ) as child:
            service = client(InferenceService, child)
            *others, last = machine(await service.survey(), work)
            found.extend(others)
            if folder is not None:
                found.append(last)
                last = room(await service.load(Load(policy=UNKNOWN, folder=str(folder))))
                if work is not None and _has_tokenizer(folder, work):
                    found.extend([await _probe(service, each) for each in environments])
        return last

    seconds = SURVEY_SECONDS if folder is None else LOAD_SECONDS
    found.append(await within(seconds, "engine", survey, problem=True))
    return found


def task_findings(settings: PeerSettings, work: Work | None) -> list[Finding]:
    """Whether the run's environments are here; a served one is only on environment peers."""
    environments = work.run.manifest.environments if work is not None else []
    return [task_of(each, settings.allowed) for each in environments if each.where == "local"]


def task_of(wanted: EnvironmentReference, allowed: Collection[str] = ()) -> Finding:
    """Whether an environment is installed in the version that a run wants."""

    def check() -> str:
        require_extra("infer", "rendering the run's tasks")
        from peers.environments.registry import load_named

        load_named(wanted, allowed)
        return f"{wanted.name} {wanted.version} is installed, as the run wants it"

    return attempt("tasks", check)


def _folder_of(model: str) -> Path:
    return find_model(model, "--model").folder.absolute()


def _has_tokenizer(model: Path, work: Work) -> bool:
    path = model / "tokenizer.json"
    return path.exists() and blake3(path.read_bytes()).digest() == work.run.manifest.tokenizer_hash


async def _probe(engine: InferenceService, environment: EnvironmentReference) -> Finding:
    digest = await engine.probe(Probe(environment=environment))
    alike = digest == environment.probe_hash
    text = f"{environment.name} {environment.version}: " + (
        "tasks are rendered as the run's owner renders them"
        if alike
        else "tasks are rendered differently from the run's owner; install the version of Swarm "
        "that the run uses, and use a policy with the run's tokenizer and chat template"
    )
    return Finding("tasks", text, {"rendered_alike": alike}, problem=not alike)


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


def machine(surveyed: Surveyed, work: Work | None) -> list[Finding]:
    """The engine, its device, and the device's memory."""
    findings = [_engine(surveyed), _device(surveyed, work)]
    if surveyed.unused_gpu:
        findings.append(Finding("gpu", surveyed.unused_gpu, {"unused": surveyed.unused_gpu}))
    return [*findings, _memory(surveyed, work)]


def room(loaded: Loaded) -> Finding:
    """How many completions the engine generates at once with the policy that it has loaded."""
    text = (
        f"weights {readable_bytes(loaded.weights_bytes)}, "
        f"cache {readable_bytes(loaded.row_bytes)} per completion of {loaded.row_tokens:,} tokens, "
        f"{readable_bytes(loaded.free_bytes)} were free"
    )
    if loaded.slots:
        text += f": up to {loaded.slots:,} completions at once"
    names = ("weights_bytes", "row_bytes", "row_tokens", "slots", "free_bytes")
    return Finding("model", text, {name: getattr(loaded, name) for name in names})


def _engine(found: Surveyed) -> Finding:
    torch = f" (PyTorch {found.torch_version})" if found.torch_version else ""
    return Finding(
        "engine",
        f"{found.engine} {found.engine_version}".strip() + torch,
        {"name": found.engine, "version": found.engine_version, "torch": found.torch_version},
    )


def _device(found: Surveyed, work: Work | None) -> Finding:
    measured = work.run.manifest.thresholds.measured_dtypes if work is not None else []
    unmeasured = bool(measured) and found.dtype not in measured
    advice = f"; the run measured {' and '.join(measured)} alone: set dtype to one of them, or "
    advice += "honest work may be refused"
    driver = f", {found.driver}" if found.driver else ""
    threads = f"{found.threads} thread{'s' * (found.threads != 1)}"
    return Finding(
        "device",
        f"{found.device} ({found.device_title}){driver}, computing in {found.dtype}, {threads}"
        + (printable(advice) if unmeasured else ""),
        {
            "name": found.device,
            "title": found.device_title,
            "driver": found.driver,
            "dtype": found.dtype,
            "threads": found.threads,
        },
        advice=unmeasured,
    )


def _memory(found: Surveyed, work: Work | None) -> Finding:
    figures: dict[str, Any] = {"free_bytes": found.free_bytes}
    text = f"{readable_bytes(found.free_bytes)} free on {found.device}"
    if work is None or work.checkpoint is None:
        return Finding("memory", text, figures)
    total = work.checkpoint.total_bytes + work.checkpoint.base_bytes
    # Policies of a run are published in bfloat16, or in float32 where the base policy was.
    most = total * ITEM_BYTES.get(found.dtype, 2) // 2
    figures |= {"weights_bytes_min": total, "weights_bytes_max": most}
    needs = " to ".join(readable_bytes(each) for each in sorted({total, max(total, most)}))
    text += f"; the weights need {needs}, and each completion its cache besides"
    return Finding("memory", text, figures, problem=total > found.free_bytes)


def disk(settings: PeerSettings, free_bytes: int, work: Work | None) -> Finding:
    """The room for the policies that the run keeps."""
    whose = "left of the quota" if settings.quota_bytes is not None else "free"
    figures: dict[str, Any] = {"free_bytes": free_bytes, "home": str(settings.home_path)}
    text = f"{readable_bytes(free_bytes)} {whose} in {settings.home_path}"
    if work is None or work.checkpoint is None:
        return Finding("disk", text, figures)
    size, kept = work.checkpoint.total_bytes, work.run.checkpoints_kept
    base = work.checkpoint.base_bytes
    needed = base + size * kept
    figures |= {"policy_bytes": size, "policies_kept": kept, "needed_bytes": needed}
    adapted = f" and their base of {readable_bytes(base)}" if base else ""
    text += f"; {kept} policies of {readable_bytes(size)}{adapted} are kept, "
    text += f"{readable_bytes(needed)} in all"
    return Finding("disk", text, figures, problem=base + size > free_bytes)
