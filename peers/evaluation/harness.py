"""lm-eval's tasks on one of our engines, as a child of `swarm eval`.

lm-eval brings forty packages, so it is an extra and may live in an interpreter of its own. It is
imported in this child only, and runs offline: a task's data must be on this machine.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

from peers.engines.device import use_hardware
from peers.engines.registry import check_engine, make_engine
from peers.environments import Renderer
from peers.environments.renderer import stop_ids_of
from peers.evaluation.samples import open_samples
from peers.evaluation.tasks import checkpoint_hash
from swarm.errors import UserError
from swarm.jobs.evaluation import (
    Answer,
    AskHarnessProgress,
    HarnessDone,
    HarnessFigure,
    HarnessProgress,
    HarnessService,
    HarnessSetup,
    RunHarness,
)
from swarm.world.tasks import JobThread, in_job_thread

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

BOOTSTRAP_RESAMPLES = 1000
"""For standard errors of metrics that have no formula; lm-eval's default takes minutes."""


class LmEvalService:
    """Implements `swarm.jobs.evaluation.HarnessService`."""

    def __init__(self, setup: HarnessSetup) -> None:
        if importlib.util.find_spec("lm_eval") is None:
            raise UserError(
                "tasks lm_eval:NAME need lm-eval, which is not installed here; type: pip install "
                "'swarm-rl[eval]', or name the Python of an environment with it by --interpreter"
            )
        check_engine(setup.engine)
        use_hardware(setup.hardware)
        os.environ.update(OFFLINE)
        self._setup = setup
        self._folder = Path(setup.folder)
        self._renderer = Renderer(self._folder)
        self._progress = HarnessProgress(finished=0, total=0)
        self._thread = JobThread()

    async def progress(self, job: AskHarnessProgress) -> HarnessProgress:
        """Not in the job thread, which evaluates."""
        return self._progress

    @in_job_thread
    def evaluate(self, job: RunHarness) -> HarnessDone:
        import lm_eval
        from lm_eval.tasks import TaskManager

        from peers.evaluation.harness_model import EngineModel

        chat = self._renderer.chat if job.chat else None
        manager = TaskManager(include_path=job.include or None)
        for name in job.tasks:
            if name not in manager.all_tasks:
                raise UserError(
                    f"lm-eval has no task {name!r}; give the folder of its YAML file with "
                    "--lm-eval-include, or see `lm-eval ls tasks`"
                )
        checkpoint, stop_ids = checkpoint_hash(self._folder), stop_ids_of(self._folder)
        engine = make_engine(self._setup.engine, self._folder, self._setup.hardware)
        engine_class = engine.capabilities.engine_class
        head = {"checkpoint": checkpoint, "engine": engine_class, "stop_ids": stop_ids}
        with open_samples(Path(job.out), head, Answer) as file:
            model = EngineModel(engine, self._renderer, chat, stop_ids, file, self._note)
            try:
                results: Any = lm_eval.simple_evaluate(
                    model=model,
                    tasks=job.tasks,
                    limit=job.limit,
                    apply_chat_template=job.chat,
                    task_manager=manager,
                    bootstrap_iters=BOOTSTRAP_RESAMPLES,
                    log_samples=False,
                )
            except UserError:
                raise
            except Exception as error:  # tasks are code and data of others
                raise UserError(_explained(job, error)) from error
        return HarnessDone(checkpoint=checkpoint, engine=engine_class, figures=_figures(results))

    def _note(self, finished: int, total: int) -> None:
        self._progress = HarnessProgress(finished=finished, total=total)


_SERVICE: type[HarnessService] = LmEvalService


def _explained(job: RunHarness, error: Exception) -> str:
    """One sentence about a task that fails; most often its data is missing."""
    kinds = {each.__name__ for each in type(error).__mro__}
    detail = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
    names = ", ".join(job.tasks)
    if kinds & {"ConnectionError", "OfflineModeIsEnabled", "FileNotFoundError"}:
        return (
            f"the data of lm-eval's {names} is not on this machine ({detail}); download it "
            "beforehand into the Hugging Face cache, or name local files under dataset_kwargs in "
            "a task file of your own"
        )
    return f"lm-eval cannot evaluate {names} ({detail}); repair the task"


def _figures(results: dict[str, Any]) -> list[HarnessFigure]:
    found = []
    for task, values in sorted(results["results"].items()):
        documents = results.get("n-samples", {}).get(task, {}).get("effective", 0)
        for name, value in sorted(values.items()):
            metric, _, filtered = name.partition(",")
            if not filtered or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = values.get(f"{metric}_stderr,{filtered}")
            found.append(
                HarnessFigure(
                    task=task,
                    metric=metric if filtered == "none" else name,
                    value=float(value),
                    standard_error=float(error) if isinstance(error, (int, float)) else None,
                    documents=documents,
                )
            )
    return found
