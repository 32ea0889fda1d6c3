"""Strangers of a scored run: how they offer their contributions, and how trainers score them.

A stranger sends its contribution to each trainer by itself; gossip carries nothing of it. The first
trainers in rank fetch and score it once they have taken their own inner steps. All that a stranger
costs is bounded: one offer per peer and round, `outer.strangers_max` fetches of at most the model's
largest contribution, and of those a quarter for peers without a record, whatever their number.
"""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import median_low

import trio

from peers.outer.gathering import Gathering, ranking
from peers.outer.presence import STATUS_SECONDS, OuterLoop
from peers.outer.rating import FALLS, assignment, rate, weights
from peers.outer.store import OuterState, Own
from swarm.errors import PeerError
from swarm.jobs.outer import Offered, OuterService, ScoreRound
from swarm.wire.envelope import EVENT_LIFETIME_SECONDS, Envelope
from swarm.wire.identity import PeerId
from swarm.wire.messages import AdmissionRefused
from swarm.wire.outer import Contribution, Offer, Rated
from swarm.world.recent import Recent
from swarm.world.tasks import alongside

SCORERS = 2
"""Trainers that score a round: the first in rank, who signs it, and the next, if that one dies."""

OFFERS_MAX = 256
"""Peers whose newest offer is remembered."""

FETCH_SHARE = 1 / 2
"""Part of `outer.grace_seconds` after which what has arrived is scored: of the rest, one that gives
its files slowly would leave no time for the others' scores."""

NEWCOMERS_SHARE = 1 / 4
"""Part of `outer.strangers_max` for peers that weigh nothing yet."""


class Strangers:
    """What a trainer knows of strangers' contributions to the round that is to be closed."""

    def __init__(
        self, loop: OuterLoop, gathering: Gathering, state: Callable[[], OuterState]
    ) -> None:
        self._loop, self._gathering, self._state = loop, gathering, state
        self._peer = loop.peer
        self._offers: Recent[str, Contribution] = Recent(OFFERS_MAX)
        """By peer, in the order in which they came."""
        self._round = b""
        """The record that the present round begins from."""
        self._tried: set[str] = set()
        """Strangers whose contribution to the round was chosen."""
        self._scores: dict[str, tuple[int, int]] = {}
        self._scored: dict[str, Contribution] = {}
        """What was scored, which a later offer does not replace."""
        self._is_busy = False

    async def answer(self, request: Envelope, _: Sequence[Envelope]) -> list[Envelope]:
        """Take a stranger's offer, the first of each round; answer what is wrong with it."""
        made, sender = request.expect(Offer).contribution, request.sender
        why = self._gathering.reason(made)
        if not self._peer.trusted_part("replica").admits(sender):
            why = "this peer is not admitted to the run, which it asks for every 10 s"
        elif made.trainer != sender or self._peer.run.manifest.is_trainer(sender):
            why = "a stranger offers its own contribution; a trainer announces it in its status"
        elif sender not in self._offers or self._offers[sender].base_round < made.base_round:
            self._offers[sender] = made
            self._loop.changed.touch()
        refusal = AdmissionRefused(peer=sender, reason=why[:500])
        return [await self._peer.seal(refusal, EVENT_LIFETIME_SECONDS)] if why else []

    async def run(self, child: OuterService, bytes_max: int) -> None:
        """Score what strangers offer, until cancelled. Raises `ChildDied`."""
        async with self._peer.messenger.answering({Offer: self.answer}):
            while True:
                chosen = self._choose()
                if not chosen or not self._may_score():
                    await self._loop.changed.wait_change()
                    continue
                self._is_busy = True
                try:
                    async with alongside(until=partial(self._until_closed, self._round)):
                        await self._score(chosen, child, bytes_max)
                finally:
                    self._is_busy = False
                self._loop.changed.touch()

    async def _until_closed(self, record: bytes) -> None:
        while self._state().record == record:
            await self._loop.changed.wait_change()

    def _may_score(self) -> bool:
        """Whether it is this trainer's turn to score, and its own inner steps are done."""
        own, run = self._peer.peer_id, self._peer.run
        held = self._gathering.ready(self._round).get(own)
        ranked = ranking(tuple(run.manifest.trainer_ids()), run.id, self._state().round + 1)
        present = [each for each in ranked if each in self._loop.presence.present()]
        return held is not None and held[0].base == self._round and own in present[:SCORERS]

    def _known(self) -> dict[str, Rated]:
        """The ratings that the present round begins from."""
        link = self._loop.chain.get(self._state().record)
        return {each.trainer: each for each in link.record.rated} if link is not None else {}

    def _tokens(self) -> int:
        """The median of the named trainers' tokens: who trains on far fewer learns by heart
        the few sequences on which its gain is then measured."""
        ready = self._gathering.ready(self._round).values()
        return median_low([made.tokens for made, _ in ready if made.base == self._round] or [0])

    def _choose(self) -> list[Contribution]:
        """The offers that may be fetched now, in the order in which they came."""
        if self._round != self._state().record:
            self._round, self._scores, self._tried = self._state().record, {}, set()
            self._scored = {}
        known, most = self._known(), self._peer.run.manifest.outer.strangers_max
        heavy = {each for each, heavy in weights(list(known.values())).items() if heavy}
        newcomers = max(1, int(most * NEWCOMERS_SHARE)) - len(self._tried - heavy)
        tokens = self._tokens()
        waiting = [
            each
            for each, made in self._offers.items()
            if made.base == self._round and each not in self._tried and 2 * made.tokens >= tokens
        ]
        # Who has shown least comes last, so that a flood of keys is paid for once per key.
        self._peer.node.world.random.shuffle(waiting)
        waiting.sort(key=lambda each: -known[each].gain_rating if each in known else 0)
        # Nor do newcomers that give their files slowly delay the others' scores.
        chosen = [each for each in waiting if each in heavy]
        chosen = chosen or [each for each in waiting if each not in heavy][: max(0, newcomers)]
        chosen = chosen[: max(0, most - len(self._tried))]
        return [made for each, made in self._offers.items() if each in chosen]

    async def _score(
        self, chosen: Sequence[Contribution], child: OuterService, bytes_max: int
    ) -> None:
        """Fetch, check and score contributions; one that does not come in time is left out."""
        self._tried |= {each.trainer for each in chosen}
        with trio.move_on_after(self._peer.run.manifest.outer.grace_seconds * FETCH_SHARE):
            async with trio.open_nursery() as nursery:
                for made in chosen:
                    take = self._gathering.take_stranger
                    nursery.start_soon(take, made, self._round, child, bytes_max)
        state, artifacts = self._state(), self._loop.artifacts
        found = [each for each in chosen if self._gathering.holds(each)]
        folders = [artifacts.folder(each.artifact) or "" for each in found]
        at = artifacts.state_folder(*state[:2])
        named = [
            artifacts.local(folder)
            for made, _ in self._gathering.ready(state.record).values()
            if made.base == state.record and (folder := artifacts.folder(made.artifact))
        ]
        if not found or not named or at is None:
            return
        run, now = self._peer.run.id, state.round + 1
        offered = [
            Offered(
                trainer=made.trainer,
                folder=artifacts.local(folder),
                tokens=made.tokens,
                seed=assignment(run, now, state.record, made.trainer),
            )
            for made, folder in zip(found, folders, strict=True)
        ]
        draw = self._peer.node.world.random.randbytes(32)  # nobody can try hashes until one suits
        job = ScoreRound(state=artifacts.local(at), named=named, strangers=offered, draw=draw)
        results = await child.score(job)
        if self._state().record != state.record:
            return
        for made, scored in zip(found, results, strict=bool(results)):
            self._scores[made.trainer] = scored.gain, scored.own
            self._scored[made.trainer] = made
            why = scored.problem
            if not why and scored.gain <= FALLS:
                why = "it raises the loss of sequences that it did not know"
            elif not why and scored.own <= 0:
                why = (
                    "the sequences that it was assigned gain no more than others; replica.data, "
                    "weights, sequence_tokens and validation_sequences must be the trainers'"
                )
            if why:
                self._gathering.refuse(made, why)

    def wait_seconds(self) -> float:
        """How much longer than without strangers a round may stay open now: while an offer is not
        scored, or a stranger is missing that contributed to the last round."""
        waits = self._is_busy or bool(self._choose()) or not self._may_score()
        known = self._known().items()
        missing = {each for each, rated in known if rated.gain > 0} - self._tried
        return self._peer.run.manifest.outer.grace_seconds if waits or missing else 0.0

    def rated(self) -> tuple[list[Rated], list[Contribution]]:
        """The ratings after the present round, and the contributions that weigh something."""
        self._choose()  # the round may have changed
        rated = rate(list(self._known().values()), self._scores)
        heavy = [each for each, heavy in weights(rated).items() if heavy]
        return rated, [self._scored[each] for each in heavy if each in self._scored]


async def keep_offering(loop: OuterLoop, made: Callable[[], Own | None]) -> None:
    """Offer a stranger's newest contribution to all trainers that are present, until cancelled."""
    peer, reported = loop.peer, Recent[tuple[str, str], None](OFFERS_MAX)

    async def offer(trainer: str, request: Envelope) -> None:
        try:
            await peer.node.reach(PeerId(trainer))
            for answer in await peer.messenger.request(PeerId(trainer), request):
                if isinstance(answer.message, AdmissionRefused) and answer.sender == trainer:
                    reason = answer.message.reason
                    if (trainer, reason) not in reported:
                        peer.node.events.emit("outer.offer_refused", trainer=trainer, reason=reason)
                    reported[trainer, reason] = None
        except PeerError as error:
            peer.node.events.emit("outer.not_answered", remote=trainer, reason=str(error))

    while True:
        own = made()
        if own is not None:
            request = await peer.seal(Offer(contribution=own.contribution), EVENT_LIFETIME_SECONDS)
            async with trio.open_nursery() as nursery:
                for trainer in loop.presence.present():
                    nursery.start_soon(offer, trainer, request)
        with trio.move_on_after(STATUS_SECONDS):
            while made() == own:
                await loop.changed.wait_change()
