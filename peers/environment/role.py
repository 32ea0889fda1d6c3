"""The environment role: render prompts, answer the model and grade, for served environments.

A worker asks for the prompts of its groups and for the turn after each segment of its model; every
answer is a signed turn. A validator asks for the grade of a finished episode. A request holds the
whole episode, except to the environment peer that gave the turn before and remembers it. So any
environment peer can answer: one that takes over plays the episode again. The environments' code
runs in child processes (`pool`), never here."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

import msgspec
import trio

from peers.environment import pool
from peers.environment.memory import Texts
from peers.sandbox import SandboxError
from peers.sandbox.run import findings as sandbox_findings
from swarm.errors import SwarmError
from swarm.events import Rationed
from swarm.gossip.topics import RUN, WORK
from swarm.jobs import SubmissionOrder
from swarm.jobs.environment import DrawPrompt, EnvironmentSetup, GradeEpisode, PlayTurn
from swarm.node.run_node import RunNode
from swarm.rollouts.seeds import environment_of_group, rendezvous
from swarm.rollouts.signed_turns import BadTurn, has_room, open_turn
from swarm.run.admission import check_admission, is_worker
from swarm.run.work import OrderBook, check_rendering, submission_order
from swarm.transport.rates import TokenBuckets
from swarm.wire import turns
from swarm.wire.envelope import STATE_LIFETIME_SECONDS, Envelope
from swarm.wire.identity import PeerId
from swarm.wire.manifest import EnvironmentReference
from swarm.wire.messages import Admission, Message, StepOrder
from swarm.wire.messenger import REQUESTS_OPEN_MAX, first
from swarm.world import ChildError, ChildUserError, is_childs
from swarm.world.tasks import Guarded, open_guarded

ATTEMPTS_MAX = 2
"""Failed calls over one episode, after which it is over, or has no prompt, or no grade."""

FAILURES_KEPT = 4096
"""Episodes whose failed calls are counted."""

WORKERS_REMEMBERED_MAX = 4096
"""Workers whose requests are counted."""

BURST_SECONDS = 20.0
"""Requests at once are those of this time: all samples of a batch may end their turn together."""


REPLY_SECONDS = 45.0
"""Time after which a worker whose turn is still being made is told to ask again: less than its
deadline, which would end all its other requests."""


class _Refused(SwarmError):
    """The request is refused, for a reason that the asking peer is told."""

    def __init__(self, reason: str, *, later: bool = False, incomplete: bool = False) -> None:
        super().__init__(reason)
        self.later = later
        self.incomplete = incomplete


@dataclass(eq=False)
class _Making:
    """A turn in the making. It is finished and kept though nobody waits for it any more: to play it
    again would cost a slow tool's time again, and may give another answer."""

    done: trio.Event = field(default_factory=trio.Event)
    made: Envelope | _Refused | None = None


class EnvironmentRole:
    """Serves environments. Must run on a peer that the manifest names in `environment_peers`."""

    topics: ClassVar[tuple[str, ...]] = (RUN, WORK)  # the presence of other peers
    Settings: ClassVar[type[pool.EnvironmentSettings]] = pool.EnvironmentSettings
    machine = staticmethod(sandbox_findings)

    def __init__(self, peer: RunNode) -> None:
        self._peer = peer
        self._run = peer.run
        self._node = peer.node
        self._registrar = peer.trusted_part("environment").registrar
        self._settings = settings = peer.node.settings.of("environment", pool.EnvironmentSettings)
        self._pool = pool.Pool(peer.node, settings)
        self._orders = OrderBook()
        rate = settings.requests_per_second
        self._rates = TokenBuckets(rate, rate * BURST_SECONDS, WORKERS_REMEMBERED_MAX)
        self._signed = pool.SignedTurns(peer.node.disk, settings.turns_mb << 20)
        self._texts = Texts()
        self._failures: Counter[tuple[str, bytes, int, int]] = Counter()
        """Calls that failed, by kind (`prompt`, `turn` or `grade`) and episode."""
        self._making: dict[str, dict[pool.Key, _Making]] = {}
        """Turns in the making, by worker and place."""
        self._guarded: Guarded | None = None
        """Owns the tasks that make them, while this peer serves."""
        self._dropped = Rationed(peer.node.events)
        peer.gossip.listen(StepOrder, self._orders.take)

    def _take_shown(self, shown: Envelope | None) -> None:
        """Note a trainer's order beside a request: this peer may have missed its publication."""
        if shown is not None and self._run.may_be_shown(shown):
            self._orders.take(shown)

    async def run(self) -> None:
        """Serve until cancelled. Raises `UserError` for an environment that this machine lacks or
        renders otherwise than the run's owner."""
        served = [each for each in self._run.manifest.environments if each.where == "served"]
        await self._signed.open()
        try:
            await self._serve(served)
        finally:
            self._signed.close()

    async def _serve(self, served: list[EnvironmentReference]) -> None:
        self._peer.status.doing = "waiting for a policy"
        envelope = await self._peer.order.wait_until(lambda order: order is not None)
        assert envelope is not None
        policy = envelope.expect(StepOrder).checkpoint
        with self._peer.store.pinned(policy):  # a child that is started again reads it again
            folder = await self._peer.policies.get(policy)
            setup = EnvironmentSetup(
                environments=served, folder=str(self._node.disk.local_path(folder))
            )
            self._peer.status.doing = "ready to serve"
            async with (
                open_guarded() as self._guarded,
                self._peer.messenger.answering(
                    {turns.TurnRequest: self._on_turn, turns.GradeRequest: self._on_grade}
                ),
            ):
                await self._pool.run(setup, lambda service: check_rendering(service.probe, served))

    async def _on_turn(
        self, envelope: Envelope, supporting: Sequence[Envelope]
    ) -> Sequence[Envelope]:
        """Answer a worker with a signed turn; a stranger or a flood gets nothing."""
        worker, request = envelope.sender, envelope.expect(turns.TurnRequest)
        if cause := self._unwelcome(worker, request, first(supporting, Admission)):
            self._dropped.emit("environment.request_dropped", remote=worker, cause=cause)
            return []
        try:
            return [await self._turn(worker, request, supporting)]
        except _Refused as refusal:
            return [await self._refusal(refusal)]

    def _unwelcome(self, worker: str, request: turns.TurnRequest, shown: Envelope | None) -> str:
        """Why a request is dropped without an answer; empty if it is answered."""
        if not self._run.trusts(worker):
            wall_time = self._node.world.wall_time()
            if shown is None or check_admission(shown, self._run, worker, wall_time) is not None:
                return "not_admitted"
            admission = shown.expect(Admission)
            if not is_worker(admission.roles) or admission.entry != request.entry:
                return "not_admitted"
        if not self._rates.of(worker).take(1, self._node.world.now()):
            return "over_rate"
        return ""

    async def _turn(
        self, worker: str, request: turns.TurnRequest, supporting: Sequence[Envelope]
    ) -> Envelope:
        self._take_shown(first(supporting, StepOrder))
        order = await self._order_of(worker, request)
        seed = order.seed()
        omitted = self._texts.beginning(seed, request.group, request.sample, request.omitted)
        if omitted is None:
            raise _Refused("the omitted tokens are not known here", incomplete=True)
        segments = self._segments(request, supporting, omitted)
        if len(segments) % 2:
            raise _Refused("an episode must end with a segment of the model")
        if not has_room(segments[1::2], order.sampling.max_new_tokens):
            raise _Refused("the episode is over: it is as long as the run allows")
        before = turns.pack(token for segment in segments for token in segment)
        turn = turns.Turn(
            seed=seed,
            group=request.group,
            sample=request.sample,
            index=len(segments) // 2,
            before=turns.packed_digest(before),
        )
        if (known := self._signed.find(turn)) is not None:
            if segments:
                self._texts.keep(known.expect(turns.Turn), before)
            return known
        asker = pool.Asker(worker, self._node.transport.network_of(PeerId(worker)))
        if not self._signed.has_room(asker):
            raise _Refused("the turns signed for it and its network fill their space", later=True)
        found = self._orders.find(request.lineage, request.step)
        assert found is not None, "the order of the request was found"
        if segments:
            self._check_is_in_charge(found, seed)
            if turn.index > 1:
                self._check_shown(request, turn, segments, first(supporting, turns.Turn))
        of_worker, key = self._making.get(worker, {}), pool.key_of(turn)
        making = of_worker.get(key)
        if making is None:
            if len(of_worker) >= REQUESTS_OPEN_MAX:
                raise _Refused(f"{len(of_worker)} of its turns are being made", later=True)
            making = self._making.setdefault(worker, {})[key] = _Making()
            assert self._guarded is not None
            self._guarded.start_soon(partial(self._make, making, order, turn, segments, asker))
        with trio.move_on_after(REPLY_SECONDS):
            await making.done.wait()
        if isinstance(making.made, _Refused):
            raise making.made
        if making.made is None:
            raise _Refused("the turn is still being made", later=True)
        if segments:
            self._texts.keep(making.made.expect(turns.Turn), before)
        return making.made

    async def _make(
        self,
        making: _Making,
        order: SubmissionOrder,
        turn: turns.Turn,
        segments: list[list[int]],
        asker: pool.Asker,
    ) -> None:
        try:
            making.made = await self._made(order, turn, segments, asker)
        except _Refused as refusal:
            making.made = refusal
        finally:
            del self._making[asker.worker][pool.key_of(turn)]
            if not self._making[asker.worker]:
                del self._making[asker.worker]
            making.done.set()

    async def _made(
        self, order: SubmissionOrder, turn: turns.Turn, segments: list[list[int]], asker: pool.Asker
    ) -> Envelope:
        """Raises `_Refused`."""
        try:
            if segments:
                turn = await self._answer(order, turn, segments)
            else:
                turn = await self._prompt(order, turn)
        except pool.TooBusy as error:
            raise _Refused(str(error), later=True) from error
        except (pool.CallFailed, ChildError) as error:
            turn = self._after_failure(turn, error)
        signed = await self._peer.seal(turn, STATE_LIFETIME_SECONDS)
        at = (order.policy.lineage, order.step)
        newest = self._peer.step_order()
        last = (newest.lineage, newest.step) if newest is not None else at
        oldest = (last[0], last[1] - self._run.max_staleness)
        return await self._signed.keep(signed, at, oldest, asker)

    def _check_is_in_charge(self, order: StepOrder, seed: bytes) -> None:
        """Raise `_Refused` while an environment peer lives that ranks before this one.

        If several answered, a worker could choose among the answers of an environment that is not
        deterministic. Prompts are: the hash of the probe tasks covers them."""
        for peer in rendezvous(self._run.environment_peers(order), seed):
            if peer == self._peer.peer_id:
                return
            if not self._registrar.is_silent(peer):
                reason = f"environment peer {peer} is there, and answers this submission's episodes"
                raise _Refused(reason, later=True)

    def _after_failure(self, turn: turns.Turn, error: pool.CallFailed | ChildError) -> turns.Turn:
        """The failed turn after a call that failed; raises `_Refused` if the worker may ask again.

        A child's `UserError` about a turn is the environment's, and final; other errors about turns
        are the request's. A prompt needs nothing of the worker, so that any error counts."""
        self._check_machine(error)
        reason = str(error)
        if turn.index and isinstance(error, ChildError):
            if not isinstance(error, ChildUserError):
                raise _Refused(reason[:500]) from error
            return _failed(turn, reason)
        key = ("turn" if turn.index else "prompt", turn.seed, turn.group, turn.sample)
        self._count_failure(key, error)
        del self._failures[key]
        return _failed(turn, reason)

    def _check_machine(self, error: SwarmError) -> None:
        """Raise `_Refused` for an error of this machine: the same may work later, or elsewhere."""
        if is_childs(error, SandboxError):
            self._dropped.emit("environment.sandbox_failed", reason=str(error))
            raise _Refused(str(error)[:500], later=True) from error

    def _count_failure(self, key: tuple[str, bytes, int, int], error: SwarmError) -> None:
        """Count a failed call; raises `_Refused` until the last attempt has failed."""
        if len(self._failures) > FAILURES_KEPT:
            self._failures.clear()
        self._failures[key] += 1
        if self._failures[key] < ATTEMPTS_MAX:
            raise _Refused(str(error)[:500], later=True) from error

    async def _prompt(self, order: SubmissionOrder, turn: turns.Turn) -> turns.Turn:
        job = DrawPrompt(order=order, group=turn.group)
        drawn = await self._pool.call(order.worker, lambda service: service.draw(job))
        return _with_tokens(turn, drawn.tokens, last=drawn.last)

    async def _answer(
        self, order: SubmissionOrder, turn: turns.Turn, segments: list[list[int]]
    ) -> turns.Turn:
        job = PlayTurn(order=order, group=turn.group, sample=turn.sample, segments=segments)
        played = await self._pool.call(order.worker, lambda service: service.play(job))
        if played.differs:
            return _failed(
                turn,
                "the environment gives other turns when the episode is played again, so that no "
                "other environment peer can continue it",
            )
        return _with_tokens(turn, played.tokens)

    def _check_shown(
        self,
        request: turns.EpisodeRequest,
        turn: turns.Turn,
        segments: list[list[int]],
        shown: Envelope | None,
    ) -> None:
        """Raise `_Refused` unless an environment peer signed the turns so far: the hash in `shown`,
        the last of them, covers all others."""
        order = self._orders.find(request.lineage, request.step)
        assert order is not None, "the order of the request was found"
        manifest = self._run.manifest_of(order)
        assert manifest is not None, "the version of the request's step was found"
        if shown is None:
            raise _Refused("the environment's last turn must stand beside a request")
        before = [token for segment in segments[:-2] for token in segment]
        try:
            last = open_turn(
                shown.raw,
                run=self._run.id,
                peers=manifest.environment_ids(),
                seed=turn.seed,
                group=turn.group,
                sample=turn.sample,
                index=turn.index - 1,
                before=before,
            )
        except BadTurn as error:
            raise _Refused(str(error)) from error
        if last.tokens != turns.pack(segments[-2]):
            raise _Refused("the environment's last turn has other tokens than the request")

    async def _on_grade(
        self, envelope: Envelope, supporting: Sequence[Envelope]
    ) -> Sequence[Envelope]:
        """Answer a validator with a grade. The gate lets nobody else ask."""
        request = envelope.expect(turns.GradeRequest)
        try:
            return [await self._grade(request, supporting)]
        except _Refused as refusal:
            return [await self._refusal(refusal)]

    async def _grade(self, request: turns.GradeRequest, supporting: Sequence[Envelope]) -> Envelope:
        self._take_shown(first(supporting, StepOrder))
        order = await self._order_of(request.worker, request)
        segments = self._segments(request, supporting)
        if len(segments) % 2 or not segments:
            raise _Refused("a finished episode must end with a segment of the model")
        job = GradeEpisode(
            order=order, group=request.group, sample=request.sample, segments=segments
        )
        key = ("grade", order.seed(), request.group, request.sample)
        try:
            grade = await self._pool.call(
                f"grades of {order.worker}", lambda service: service.grade(job)
            )
        except pool.TooBusy as error:
            raise _Refused(str(error), later=True) from error
        except ChildError as error:
            self._check_machine(error)
            raise _Refused(str(error)[:500]) from error
        except pool.CallFailed as error:
            self._count_failure(key, error)
            self._failures[key] -= 1  # a later request is tried once
            grade = turns.EpisodeGrade(reward=0.0, not_gradable=str(error)[:500])
        return await self._peer.seal(grade, STATE_LIFETIME_SECONDS)

    async def _order_of(self, worker: str, request: turns.EpisodeRequest) -> SubmissionOrder:
        """What the step's order asks of a worker; raises `_Refused` for work that none wants."""
        found = await self._orders.wait_for(request.lineage, request.step)
        manifest = self._run.manifest_of(found) if found is not None else None
        if found is None or manifest is None:
            raise _Refused("no such step is known here yet", later=True)
        newest = self._peer.step_order()
        if newest is not None and (
            found.lineage < newest.lineage or newest.step - found.step > self._run.max_staleness
        ):
            raise _Refused("that step is too old to be trained on")
        order = submission_order(
            self._run.id, manifest, found, worker=worker, number=request.number, entry=request.entry
        )
        if (
            request.number >= found.submissions_max
            or request.group >= order.groups
            or request.sample >= manifest.sampling.group_size
        ):
            raise _Refused("the step order allows no such submission, group or sample")
        weights = [each.weight for each in order.environments]
        index = environment_of_group(order.seed(), request.group, weights)
        if manifest.environments[index].where != "served":
            raise _Refused("that group's environment is not served: the worker renders it itself")
        return order

    def _segments(
        self, request: turns.EpisodeRequest, supporting: Sequence[Envelope], omitted: bytes = b""
    ) -> list[list[int]]:
        """The segments of a request; raises `_Refused`."""
        further = [
            each.message for each in supporting if isinstance(each.message, turns.EpisodeTokens)
        ]
        try:
            return turns.segments_of(request, further, omitted)
        except ValueError as error:
            raise _Refused(str(error)) from error

    async def _refusal(self, refusal: _Refused) -> Envelope:
        message: Message = turns.TurnRefused(
            reason=str(refusal)[:500], later=refusal.later, incomplete=refusal.incomplete
        )
        return await self._peer.seal(message, STATE_LIFETIME_SECONDS)


def _with_tokens(turn: turns.Turn, tokens: Sequence[int], *, last: bool = False) -> turns.Turn:
    """A turn with its tokens; one that is too long for a message has failed."""
    packed = turns.pack(tokens)
    if len(packed) > turns.PACKED_BYTES_MAX:
        return _failed(
            turn, f"the environment's turn has {len(tokens)} tokens, more than a message can carry"
        )
    return msgspec.structs.replace(turn, tokens=packed, last=last)


def _failed(turn: turns.Turn, reason: str) -> turns.Turn:
    """The turn that ends an episode because the environment cannot go on with it."""
    return msgspec.structs.replace(turn, failed=reason[:500])
