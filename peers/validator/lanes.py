"""The lanes in which cases are judged, each with an inspector of its own, which a hostile file may
kill or hold up. All share the prefill child, which holds the policy."""

from dataclasses import dataclass
from functools import partial

import trio

from peers.sandbox import SandboxError
from peers.validator.cases import Case, Outcome, crashed, quarantine
from peers.validator.checks.standing import staleness
from peers.validator.examiner import Children, Examiner, PutDown
from peers.validator.inbox import Inbox
from peers.validator.queue import CaseQueue
from peers.validator.verdicts import Verdicts
from swarm.errors import PeerError
from swarm.jobs.validation import InspectionService, InspectionSetup, PrefillService
from swarm.node.run_node import RunNode
from swarm.node.trusted import UNGRADED, UNGRADED_MAX
from swarm.wire.identity import PeerId
from swarm.world import ChildDied, ChildError, ChildUserError, client, is_childs
from swarm.world.observable import complain
from swarm.world.restarts import Restarts
from swarm.world.tasks import alongside, open_guarded

ATTEMPTS_MAX = 3
"""Attempts to judge a submission, whose check ends child processes or fails in them, before it is
quarantined. One failure says little, since a child may run out of memory or be killed. Without a
limit, a file that kills its reader would block all other submissions."""

AGAIN_SECONDS = 1.0
"""Pause before the second attempt after an error, four times as long before the third. (Those after
a death are in `Restarts`.)"""

UNGRADED_PAUSE_SECONDS = 60.0
"""Length of the pause of a validator whose environment fails; then it accepts pushes again."""

SAID_PEERS_MAX = 8
"""Most workers named in the event that says that no submission arrives."""

INSPECTOR_MEMORY_BYTES = 2 << 30
"""Memory limit of an inspector: several times the largest file's arrays and rewards."""


@dataclass
class Lane:
    """One lane, which outlives its child processes."""

    number: int
    name: str
    """Name of its inspector."""
    restarts: Restarts
    case: Case | None = None
    """The case being judged; it stays here to be judged again if a child dies over it."""
    failures: int = 0
    """Number of attempts to judge that case that failed."""
    hung: str = ""
    """Why its inspector died over that case, if an environment's code did not return."""


@dataclass(eq=False)
class Lanes:
    """Judges the queue's cases as long as the prefill child lives."""

    peer: RunNode
    queue: CaseQueue
    examiner: Examiner
    verdicts: Verdicts
    interpreter: str | None
    equipped: trio.Event
    """Set once a child has found engine and environment, so that policies are needed."""
    inbox: Inbox
    """Open for pushes, but for pauses."""
    count: int
    """Number of lanes."""
    ungraded: int = 0
    """Number of honest submissions in a row that the environment could not grade."""

    def __post_init__(self) -> None:
        names = ["inspector", *(f"inspector-{number}" for number in range(2, self.count + 1))]
        self.lanes = [
            Lane(number, name, Restarts(self.peer.node.events, name))
            for number, name in enumerate(names)
        ]

    async def run(self, prefill: PrefillService, nursery: trio.Nursery) -> None:
        """Judge until cancelled; raises `ChildDied`: the prefill child, or too many inspectors."""

        async def run_lane(lane: Lane) -> None:
            await lane.restarts.run(lambda: self._live(lane, prefill, nursery))

        async with open_guarded() as guarded:
            for lane in self.lanes:
                guarded.start_soon(partial(run_lane, lane))

    async def _live(self, lane: Lane, prefill: PrefillService, nursery: trio.Nursery) -> None:
        """Judge while the inspector lives; only the first lane starts it before it has a case."""
        if lane.number > 0:
            await self.equipped.wait()
            lane.case = lane.case or await self._next(lane)
        async with self.peer.node.compute.child(
            "peers.validator.inspector:InspectorService",
            InspectionSetup(environments=self.peer.run.manifest.environments),
            name=lane.name,
            memory_limit_bytes=INSPECTOR_MEMORY_BYTES,
            interpreter=self.interpreter,
        ) as inspector:
            self.equipped.set()
            children = Children(client(InspectionService, inspector), prefill, lane.restarts)
            while True:
                lane.case = lane.case or await self._next(lane)
                await self._judge(lane, lane.case, children, nursery)

    async def _next(self, lane: Lane) -> Case:
        """Wait for the next case for a lane; the first one says why none comes."""
        says = [partial(complain, self._say_without_work)] if lane.number == 0 else []
        async with alongside(*says):
            case = await self.queue.next(lane.number)
        return case  # noqa: RET504 - mypy takes it for a block that may swallow errors

    def _say_without_work(self, seconds: float) -> None:
        order = self.peer.step_order()
        if order is None:
            trainers = [trainer.peer for trainer in self.peer.run.manifest.trainers]
            self.peer.say_starved("validator", seconds, "no step order has come", trainers)
        elif order.groups_wanted > 0 and not len(self.queue):
            workers = self.peer.trusted_part("validator").registrar.live_workers()
            there = "" if workers else ", and no inference peer is there"
            reason = f"step {order.step} wants {order.groups_wanted} groups, "
            reason += f"but no submission arrives{there}"
            self.peer.say_starved("validator", seconds, reason, workers[:SAID_PEERS_MAX])

    async def _judge(
        self, lane: Lane, case: Case, children: Children, nursery: trio.Nursery
    ) -> None:
        elsewhere = self.queue.settled_elsewhere(case)
        started = self.peer.node.world.now()
        if elsewhere is not None:
            await self.verdicts.leave_to(PeerId(elsewhere.sender), case)
        else:
            self.peer.status.doing = f"judging step {case.submission.step}"
            try:
                outcome = await self._outcome_of(lane, case, children, nursery)
            except PutDown:
                self._put_down(lane, case, self.peer.node.world.now() - started)
                return
            if outcome is None:
                return  # it stays in the lane
            seconds = self.peer.node.world.now() - started
            if case.first is not None and outcome.failed == staleness.name:
                # Too late for a second opinion, which would say nothing of the worker.
                await self.verdicts.leave_to(PeerId(case.first.sender), case)
            else:
                await self.verdicts.give(case, outcome, nursery, seconds=seconds)
            self.peer.status.doing = "ready to judge"
            self._note(outcome, nursery)
        self._put_down(lane, case, self.peer.node.world.now() - started)

    async def _outcome_of(
        self, lane: Lane, case: Case, children: Children, nursery: trio.Nursery
    ) -> Outcome | None:
        """Judge a case; None if it is to be judged again. Raises `ChildDied`."""
        try:
            return self.verdicts.if_evicted(case.worker) or await self.examiner.examine(
                case, children, lane.hung
            )
        except ChildDied as error:
            lane.failures += not error.blameless
            lane.hung = error.hung if error.child == lane.name else ""
            if lane.failures >= ATTEMPTS_MAX:
                outcome = _given_up(error)
                if lane.hung:
                    outcome.failed, outcome.detail = "environment", lane.hung
                await self.verdicts.give(case, outcome, nursery)
                self._put_down(lane, case, 0.0)
                lane.restarts.succeeded()  # the file is to blame, not this machine
            raise
        except ChildError as error:
            lane.failures += 1
            is_final = isinstance(error, ChildUserError) and not is_childs(error, SandboxError)
            if lane.failures >= ATTEMPTS_MAX or is_final:
                return _given_up(error)
            self.peer.node.events.emit("validator.judged_again", **case.named, reason=str(error))
            await trio.sleep(AGAIN_SECONDS * 4 ** (lane.failures - 1))
            return None
        except PeerError as error:
            return quarantine(
                f"the policy, the manifest or the states could not be fetched: {error}"
            )

    def _note(self, outcome: Outcome, nursery: trio.Nursery) -> None:
        """Take no pushes for a while if the environment fails, again and again: workers turn to
        validators whose environment may work. Submissions that are here are still judged."""
        if outcome.failed not in UNGRADED:
            if outcome.word == "accepted":
                self.ungraded = 0
            return
        self.ungraded += 1
        if self.ungraded < UNGRADED_MAX:
            return
        self.peer.status.doing = f"cannot grade: {outcome.detail}"[:200]
        if self.peer.blobs.inbox is not None:
            self.peer.node.events.emit(
                "validator.cannot_grade",
                submissions=self.ungraded,
                reason=outcome.detail,
                seconds=UNGRADED_PAUSE_SECONDS,
            )
            self.peer.blobs.inbox = None
            nursery.start_soon(self._reopen)

    async def _reopen(self) -> None:
        await trio.sleep(UNGRADED_PAUSE_SECONDS)
        self.peer.blobs.inbox = self.inbox

    def _put_down(self, lane: Lane, case: Case, seconds: float) -> None:
        """Note that a lane's case is settled, after so many seconds."""
        lane.case, lane.failures, lane.hung = None, 0, ""
        self.queue.done(case, seconds)


def _given_up(error: ChildDied | ChildError) -> Outcome:
    """The last attempt's outcome: errors of this machine say nothing of the submission."""
    if is_childs(error, SandboxError):
        return Outcome(failed="environment", detail=str(error), quarantined=True)
    if isinstance(error, ChildUserError):
        return quarantine(f"this validator cannot check it: {error}")
    reason = f"{ATTEMPTS_MAX} attempts to check it failed here, the last because: {error}"
    return quarantine(reason) if is_childs(error, OSError) else crashed(reason)
