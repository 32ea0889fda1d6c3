"""Simulated child processes, which answer by cost models."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import msgspec
import trio

from simnet.compute.deltas import DeltaModel
from simnet.compute.environment import EnvironmentModel
from simnet.compute.evaluation import EvaluationModel
from simnet.compute.inference import EngineModel
from simnet.compute.outer import OuterModel
from simnet.compute.rollouts import Crash
from simnet.compute.setting import Setting
from simnet.compute.training import TrainerModel
from simnet.compute.validation import InspectorModel, PrefillModel
from simnet.disk import PowerCut, SimulatedDisk
from swarm.errors import UserError
from swarm.jobs import environment, evaluation, inference, outer, training, validation
from swarm.shardcast.jobs import DeltaService
from swarm.world import Child, ChildDied, Job, Setup, error_of, job_type, kind_of, setup_type

START_SECONDS = 3.0

T = TypeVar("T")

ENGINE: type[inference.InferenceService] = EngineModel  # a type error where a model lacks a method
INSPECTOR: type[validation.InspectionService] = InspectorModel
PREFILL: type[validation.PrefillService] = PrefillModel
TRAINER: type[training.TrainingService] = TrainerModel
EVALUATION: type[evaluation.EvaluationService] = EvaluationModel
DELTAS: type[DeltaService] = DeltaModel
ENVIRONMENT: type[environment.EnvironmentService] = EnvironmentModel
OUTER: type[outer.OuterService] = OuterModel
MODELS: dict[str, Callable[..., Any]] = {
    "swarm.shardcast.delta:DeltaService": DELTAS,
    "peers.environment.service:EnvironmentPeerService": ENVIRONMENT,
    "peers.evaluation.service:EvaluationService": EVALUATION,
    "peers.engines.service:EngineService": ENGINE,
    "peers.validator.inspector:InspectorService": INSPECTOR,
    "peers.validator.prefill:PrefillService": PREFILL,
    "peers.trainer.service:open_service": TRAINER,
    "peers.outer.learning.service:open_service": OUTER,
}


def _over_the_pipe(value: Any, kind: type[T]) -> T:
    """What the other side of a real child's pipe would decode."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind)


class SimulatedChild:
    """A cost model behind `swarm.world.Child`."""

    def __init__(self, name: str, model: Any, disk: SimulatedDisk) -> None:
        self.name = name
        self._model = model
        self._machine = disk
        self._busy = trio.Lock()
        self._calls: dict[trio.CancelScope, None] = {}
        """Running calls: one, and any of the model's `BESIDE`."""
        self._died = ""
        """How the child died; empty while it lives."""
        self._hung = ""

    async def request(self, method: str, job: Job, reply: type[T]) -> T:
        work = getattr(self._model, method)
        kind = job_type(work)
        if kind is not None:
            work = partial(work, _over_the_pipe(job, kind))
        return _over_the_pipe(await self._answer(method, job, work), reply)

    async def _answer(self, method: str, job: Job, work: Callable[[], Awaitable[Any]]) -> Any:
        beside = method in getattr(self._model, "BESIDE", ())
        async with nullcontext() if beside else self._busy:
            if self._died:
                raise ChildDied(f"{self.name} {self._died}", self.name, blameless=True)
            with trio.CancelScope() as scope:
                self._calls[scope] = None
                try:
                    await self._machine_answers(method, job.patience_seconds)
                    result = await work()  # always makes progress
                    await self._machine_answers(method, job.patience_seconds)
                except PowerCut:
                    raise
                except Crash as crash:
                    self._hung = str(crash)
                    self.die()
                    await trio.sleep_forever()
                except (UserError, ValueError, OSError) as error:
                    is_users = isinstance(error, UserError)
                    raise error_of(str(error), kind_of(error), is_users) from error
                finally:
                    self._calls.pop(scope, None)
                return result
            raise ChildDied(f"{self.name} {self._died}", self.name, hung=self._hung)

    async def _machine_answers(self, method: str, patience_seconds: float) -> None:
        while True:
            with trio.move_on_after(patience_seconds):
                await self._machine.answering()
                return
            if not self._machine.asleep:
                break
        self._died = f"made no progress on {method} within {patience_seconds:g} s"
        raise ChildDied(f"{self.name} {self._died}", self.name)

    def die(self) -> None:
        """Die at once, during a call or between calls."""
        self._died = "was killed"
        for scope in tuple(self._calls):
            scope.cancel()


class SimulatedCompute:
    """Implements `swarm.world.Compute` with `MODELS`."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self.children: dict[str, SimulatedChild] = {}

    def free_memory_bytes(self) -> int:
        return self._setting.hardware.memory_bytes

    @asynccontextmanager
    async def child(
        self,
        service: str,
        setup: Setup | None = None,
        *,
        name: str,
        memory_limit_bytes: int | None = None,
        start_deadline_seconds: float = 60.0,
        interpreter: str | None = None,
    ) -> AsyncIterator[Child]:
        if service not in MODELS:
            raise ChildDied(f"{name}: there is no cost model of {service} in this simulation", name)
        await trio.sleep(START_SECONDS)
        kind = setup_type(MODELS[service])
        setups = [] if kind is None else [_over_the_pipe(setup, kind)]
        model = MODELS[service](self._setting, *setups)
        child = self.children[name] = SimulatedChild(name, model, self._setting.disk)
        try:
            yield child
        finally:
            del self.children[name]
