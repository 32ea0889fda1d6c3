"""Prompts and turns of served environments, which a worker gets from environment peers."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import trio

from peers.inference.pending import PendingSubmission
from swarm.errors import PeerError
from swarm.jobs.inference import AskedTurn, GiveTurn, InferenceService, SignedPrompt
from swarm.node.run_node import RunNode
from swarm.rollouts.seeds import rendezvous
from swarm.rollouts.signed_turns import BadTurn, open_turn
from swarm.wire import turns as wire
from swarm.wire.envelope import EVENT_LIFETIME_SECONDS, Envelope, open_envelope
from swarm.wire.identity import PeerId
from swarm.wire.messenger import REQUEST_ENVELOPES_MAX, first
from swarm.world.observable import complain
from swarm.world.tasks import open_guarded

REQUESTS_AT_ONCE = 32
"""Requests to one environment peer at a time; the messenger allows 64."""

TURN_SECONDS = 60.0
"""Deadline of one request, longer than an environment peer's `seconds_max`."""

PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 0.2, 5.0
"""Pause after all environment peers have failed to answer; it doubles each time."""

REST_SECONDS = 10.0
"""Time for which an environment peer that failed is asked after all others."""


class Unwanted(PeerError):
    """The submission cannot be finished, or nobody wants it any more; the message says why."""

    def __init__(self, message: str, failed: Envelope | None = None) -> None:
        """`failed`: what an environment peer signed in place of a group's prompt."""
        super().__init__(message)
        self.failed = failed


class _NoPrompt(Unwanted):
    """An environment peer has signed that it cannot render a group's prompt."""


class _Incomplete(PeerError):
    """An environment peer does not know the tokens that a request left out, or others."""


@dataclass(frozen=True)
class _Episode:
    """A place in a submission for which a turn is asked."""

    pending: PendingSubmission
    group: int
    sample: int
    segments: Sequence[Sequence[int]]
    """Token ids of the segments so far; none to ask for the prompt."""
    turn_before: bytes = b""
    """The signed turn before, if it is not the prompt."""

    @property
    def giver(self) -> str:
        """The environment peer that gave the turn before, and so has the episode up to it."""
        return open_envelope(self.turn_before).sender if self.turn_before else ""


class ServedTurns:
    """Asks environment peers for the prompts and turns of this worker's submissions."""

    def __init__(self, peer: RunNode) -> None:
        self._peer = peer
        self._run = peer.run
        self._rests: dict[str, float] = {}
        """Until when environment peers that failed are asked last."""
        self._limits: defaultdict[str, trio.Semaphore] = defaultdict(
            lambda: trio.Semaphore(REQUESTS_AT_ONCE)
        )
        self._waiting: dict[int, float] = {}
        """Since when requests wait for an answer."""
        self._reason = "none has answered"
        self._signed: dict[tuple[bytes, int], bytes] = {}
        """The last signed turn of each episode under way, by seed and row."""
        self.unwanted: set[bytes] = set()
        """Seeds of submissions under way that nobody wants any more."""

    async def prompts(self, pending: PendingSubmission) -> list[SignedPrompt]:
        """The served groups' prompts, once environment peers have given them; raises `Unwanted`."""
        order = pending.asked
        found: dict[int, SignedPrompt] = {}

        async def ask(group: int) -> None:
            signed, turn = await self._ask(_Episode(pending, group, 0, ()))
            found[group] = SignedPrompt(
                group=group, tokens=wire.unpack(turn.tokens), last=turn.last, signed=signed
            )

        async with open_guarded() as guarded:
            for group in order.served_groups():
                guarded.start_soon(partial(ask, group))
        return [found[group] for group in sorted(found)]

    async def serve(
        self,
        engine: InferenceService,
        begun: Callable[[], Sequence[PendingSubmission]],
        stall: Callable[[int], None],
    ) -> None:
        """Get the turns of `begun` submissions, until cancelled; raises the errors of the child.
        `stall` hears of how many submissions all episodes wait, if all do."""
        async with open_guarded() as guarded:

            async def hand_out() -> None:
                while True:
                    found = await engine.turns()
                    pending = {each.asked.seed(): each for each in begun()}
                    for asked in found.turns:
                        if asked.seed in pending:
                            guarded.start_soon(
                                partial(self._give, engine, pending[asked.seed], asked)
                            )
                    stall(found.stalled)

            guarded.nursery.start_soon(complain, self._complain)
            await guarded.guard(hand_out)

    async def _give(
        self, engine: InferenceService, pending: PendingSubmission, asked: AskedTurn
    ) -> None:
        size = pending.asked.sampling.group_size
        key = (asked.seed, asked.row)
        episode = _Episode(
            pending, asked.row // size, asked.row % size, asked.segments, self._signed.get(key, b"")
        )
        try:
            signed, turn = await self._ask(episode)
        except Unwanted as error:
            self.unwanted.add(asked.seed)
            job = GiveTurn(seed=asked.seed, row=asked.row, unwanted=str(error))
        else:
            self._signed[key] = signed
            if turn.over:
                del self._signed[key]
            job = GiveTurn(
                seed=asked.seed, row=asked.row, tokens=wire.unpack(turn.tokens), signed=signed
            )
        await engine.give(job)

    def forget(self, seed: bytes) -> None:
        """Forget the episodes of a submission that is over."""
        for key in [key for key in self._signed if key[0] == seed]:
            del self._signed[key]
        self.unwanted.discard(seed)

    # --- asking ------------------------------------------------------------------------------

    async def _ask(self, episode: _Episode) -> tuple[bytes, wire.Turn]:
        """Ask one environment peer after the other, until one gives a valid turn; returns it signed
        and opened. Raises `Unwanted` once nobody wants the submission, and after a round in which
        some peer has signed that it cannot render the prompt and no other has given one."""
        identity, pause = id(episode), PAUSE_SECONDS_MIN
        self._waiting[identity] = self._peer.node.world.now()
        try:
            while True:
                no_prompt: _NoPrompt | None = None
                for name in self._ranked(episode.pending):
                    self._check_wanted(episode.pending)
                    try:
                        async with self._limits[name]:
                            return await self._request(PeerId(name), episode)
                    except PeerError as error:
                        if isinstance(error, _NoPrompt):
                            no_prompt = error
                        elif isinstance(error, Unwanted):
                            raise
                        self._reason = str(error)
                        self._rests[name] = self._peer.node.world.now() + REST_SECONDS
                if no_prompt is not None:
                    raise no_prompt
                await trio.sleep(pause)
                pause = min(2 * pause, PAUSE_SECONDS_MAX)
        finally:
            del self._waiting[identity]

    def _ranked(self, pending: PendingSubmission) -> list[str]:
        """Peers in order of asking; after the prompt, the first that lives; raises `Unwanted`."""
        now, order = self._peer.node.world.now(), pending.order
        left = self._run.environment_peers(order)
        if not left:
            raise Unwanted(
                f"the run's owner has removed all environment peers that step {order.step} may use"
            )
        ranked = rendezvous(left, pending.asked.seed())
        return sorted(ranked, key=lambda name: self._rests.get(name, 0.0) > now)

    def _check_wanted(self, pending: PendingSubmission) -> None:
        newest, order = self._peer.step_order(), pending.order
        if newest is None or newest.final or newest.lineage != order.lineage:
            raise Unwanted(f"step {order.step} is over")
        if newest.step - order.step > self._run.max_staleness:
            raise Unwanted(f"step {order.step} is too old to be trained on")

    async def _request(self, peer: PeerId, episode: _Episode) -> tuple[bytes, wire.Turn]:
        """Raises `PeerError`, or `Unwanted` if an episode is too long."""
        await self._peer.node.reach(peer)
        if episode.giver == peer:
            try:
                return await self._ask_with(peer, episode, omitted=episode.segments[:-1])
            except _Incomplete:
                pass
        return await self._ask_with(peer, episode)

    async def _ask_with(
        self, peer: PeerId, episode: _Episode, omitted: Sequence[Sequence[int]] = ()
    ) -> tuple[bytes, wire.Turn]:
        """Ask for a turn without the first segments; raises `_Incomplete` if that is too little."""
        before = [token for segment in episode.segments for token in segment]
        left_out = sum(map(len, omitted))
        try:
            wire.check_length(len(before))
            parts = wire.divided(wire.pack(before[left_out:]))
        except ValueError as error:
            raise Unwanted(str(error)) from error
        order = episode.pending.order
        request = wire.TurnRequest(
            lineage=order.lineage,
            step=order.step,
            number=episode.pending.number,
            entry=episode.pending.entry,
            group=episode.group,
            sample=episode.sample,
            lengths=[len(segment) for segment in episode.segments],
            tokens=parts[0],
            omitted=left_out,
        )
        messages = [request, *(wire.EpisodeTokens(tokens=part) for part in parts[1:])]
        sealed = [await self._peer.seal(each, EVENT_LIFETIME_SECONDS) for each in messages]
        shown = [*sealed, *self._shown(episode)]
        if episode.pending.envelope is not None and len(shown) < REQUEST_ENVELOPES_MAX:
            shown.append(episode.pending.envelope)  # a restarted environment peer does not know it
        reply = await self._peer.messenger.request(peer, *shown, deadline_seconds=TURN_SECONDS)
        refused = first(reply, wire.TurnRefused)
        if refused is not None:
            refusal = refused.expect(wire.TurnRefused)
            reason = f"{peer} gives no turn: {refusal.reason}"
            if omitted and (refusal.incomplete or not refusal.later):
                raise _Incomplete(reason)
            raise PeerError(reason)
        given = first(reply, wire.Turn)
        if given is None:
            raise PeerError(f"{peer} did not answer a request for a turn; it may be too busy")
        try:
            turn = open_turn(
                given.raw,
                run=self._run.id,
                peers=[peer],
                seed=episode.pending.asked.seed(),
                group=episode.group,
                sample=episode.sample,
                index=len(episode.segments) // 2,
                before=before,
            )
        except BadTurn as error:
            raise (_Incomplete if omitted else PeerError)(
                f"{peer} gives a turn that no validator would accept: {error}"
            ) from error
        if turn.over and not episode.segments:
            raise _NoPrompt(f"{peer} cannot render the prompt of a group: {turn.failed}", given)
        return given.raw, turn

    def _shown(self, episode: _Episode) -> list[Envelope]:
        """What stands beside a request: this peer's admission, and the turn before."""
        admission = self._peer.lease.admission if self._peer.lease is not None else None
        shown = [admission] if admission is not None else []
        if episode.turn_before:
            shown.append(open_envelope(episode.turn_before))
        return shown

    def _complain(self, _: float) -> None:
        if not self._waiting:
            return
        seconds = self._peer.node.world.now() - min(self._waiting.values())
        if seconds < 1.0:
            return
        count = len(self._waiting)
        self._peer.say_starved(
            "inference",
            seconds,
            f"{count} episodes wait for an environment peer: {self._reason}",
            self._run.manifest.environment_ids(),
        )
