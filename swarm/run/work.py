"""Rules of the protocol about submissions that more than one role follows."""

from collections.abc import Awaitable, Callable, Iterable, Sequence

import trio

from swarm.errors import UserError
from swarm.jobs import SubmissionOrder
from swarm.jobs.inference import Probe
from swarm.rollouts.continuations import State, continued_groups
from swarm.rollouts.seeds import nonce_of, rendezvous
from swarm.run.run import Run
from swarm.wire.envelope import Envelope
from swarm.wire.manifest import EnvironmentReference, RunManifest
from swarm.wire.messages import Acknowledgement, StepOrder, Verdict
from swarm.world.observable import Observable

ORDERS_KEPT = 64
"""Step orders remembered; a few steps are open at a time."""

ORDER_WAIT_SECONDS = 3.0
"""Time to wait for a step order that the asking peer may have received first."""


class OrderBook:
    """The newest signed order of each step that a peer has heard of."""

    def __init__(self) -> None:
        self._orders: dict[tuple[int, int], Envelope] = {}
        """By lineage and step."""
        self.changed = Observable(None)

    def take(self, ordered: Envelope) -> None:
        """Remember a trainer's order; the newest order of a step is valid."""
        order = ordered.expect(StepOrder)
        key = (order.lineage, order.step)
        held = self.find(*key)
        if held is None or held.order() < order.order():
            self._orders[key] = ordered
            while len(self._orders) > ORDERS_KEPT:
                del self._orders[min(self._orders)]
            self.changed.touch()

    def find(self, lineage: int, step: int) -> StepOrder | None:
        signed = self.signed(lineage, step)
        return signed.expect(StepOrder) if signed is not None else None

    def signed(self, lineage: int, step: int) -> Envelope | None:
        return self._orders.get((lineage, step))

    async def wait_for(self, lineage: int, step: int) -> StepOrder | None:
        """The order of a step; None if it does not come within `ORDER_WAIT_SECONDS`."""
        with trio.move_on_after(ORDER_WAIT_SECONDS):
            await self.changed.wait_until(lambda _: (lineage, step) in self._orders)
        return self.find(lineage, step)


def receipt_in(run: Run, shown: Envelope, worker: str) -> Acknowledgement | Verdict | None:
    """The acknowledgement or verdict that shows that a worker's number is taken; else None.

    A verdict in no log shows nothing. It may follow a file with other bytes that the worker
    delivered before it restarted, and then comes with that file's receipt."""
    named = shown.message
    if not isinstance(named, Acknowledgement | Verdict) or named.worker != worker:
        return None
    logged = not isinstance(named, Verdict) or named.log_index >= 0
    return named if logged and run.may_be_shown(shown) else None


def judges_of(validators: Sequence[str], nonce: bytes, worker: str, number: int) -> list[str]:
    """The validators a worker asks to judge a submission, in order; `nonce`: the step order's."""
    return rendezvous(validators, nonce, worker.encode(), number.to_bytes(8, "big"))


def submission_order(
    run: str,
    manifest: RunManifest,
    order: StepOrder,
    *,
    worker: str,
    number: int,
    entry: bytes,
    groups: int | None = None,
    states: Sequence[State] = (),
) -> SubmissionOrder:
    """The fields that determine a submission's content, all of them signed.

    `entry` is that of the worker's admission, `groups` the submission's (None: as the manifest
    has it), `states` those that the step order names."""
    nonce = nonce_of(order.nonce, entry)
    if groups is None:
        groups = manifest.sampling.groups_per_submission
    return SubmissionOrder(
        run=run,
        policy=order.checkpoint,
        step=order.step,
        nonce=nonce,
        worker=worker,
        number=number,
        groups=groups,
        environments=manifest.environments,
        sampling=manifest.sampling,
        continued=continued_groups(states, manifest.values.share, nonce, worker, number, groups),
    )


def renders_otherwise(environment: EnvironmentReference) -> str:
    """What is wrong where an environment's probe tasks have another hash than the run's."""
    return (
        f"this machine renders the tasks of {environment.name} {environment.version} differently "
        "from the run's owner; install the versions of Swarm and of the environment that the run "
        "uses, or tell the owner that the policy's tokenizer or chat template is not the run's"
    )


async def check_rendering(
    probe: Callable[[Probe], Awaitable[bytes]], environments: Iterable[EnvironmentReference]
) -> None:
    """Raise `UserError` unless this machine renders tasks as the run's owner does."""
    for each in environments:
        if await probe(Probe(environment=each)) != each.probe_hash:
            raise UserError(renders_otherwise(each))
