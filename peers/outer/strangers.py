"""Strangers of a scored run: how they offer their contributions, and how trainers score them.

A stranger sends its contribution to each trainer by itself; gossip carries nothing of it. The first
trainers in rank fetch and score it once they have taken their own inner steps. All that a stranger
costs is bounded: one offer per peer and round, `outer.strangers_max` fetches of at most the model's
largest contribution, and of those a quarter for peers without a record, whatever their number."""

import math
from collections.abc import Callable, Sequence
from statistics import median_low

import trio
from blake3 import blake3

from peers.outer.artifacts import contribution_key
from peers.outer.following import Following
from peers.outer.gathering import SCORERS, Gathering, measured, ranking
from peers.outer.presence import STATUS_SECONDS, OuterLoop
from peers.outer.rating import FALLS, agreed, assignment, rate, weights
from peers.outer.store import Own
from swarm.errors import PeerError
from swarm.jobs.outer import Offered, OuterService, ScoreRound
from swarm.wire.envelope import EVENT_LIFETIME_SECONDS, Envelope
from swarm.wire.identity import PeerId
from swarm.wire.messages import AdmissionRefused
from swarm.wire.outer import Contribution, Measured, Offer, Rated
from swarm.world.recent import Recent
from swarm.world.tasks import alongside

OFFERS_MAX = 256
"""Peers whose newest offer is remembered."""

FETCH_SHARE = 1 / 2
"""Part of `outer.grace_seconds` after which what has arrived is scored: of the rest, one that gives
its files slowly would leave no time for the others' scores."""

LATE_SHARE = 1 / 2
"""Part of `outer.grace_seconds` by which a stranger may be late and begin the next round as late:
it then offers within the time that the trainers wait. Who is later begins with the round after.
Without such a pause, one that joins in the middle of a round would be late for every round."""

NEWCOMERS_SHARE = 1 / 4
"""Part of `outer.strangers_max` for peers that weigh nothing yet."""


class Strangers:
    """What a trainer knows of strangers' contributions to the round that is to be closed."""

    def __init__(self, loop: OuterLoop, gathering: Gathering, following: Following) -> None:
        self._loop, self._gathering, self._following = loop, gathering, following
        self._peer = loop.peer
        self.offers: Recent[str, Contribution] = Recent(OFFERS_MAX)
        """By peer, in the order in which they came."""
        self._came: Recent[str, float] = Recent(OFFERS_MAX)
        """And when that was."""
        self._round = b""
        """The record that the present round begins from."""
        self._tried: dict[str, Contribution] = {}
        """Strangers' contributions to the round that were chosen; a later offer replaces none."""
        self._scores: dict[str, Measured] = {}
        """What was measured of them."""
        self._fetched: list[Contribution] = []
        """What was ever chosen, and whose files may still be here."""
        self._awaited: Recent[str, int] = Recent(OFFERS_MAX)
        """The one round that waits for a stranger which offered too late for the round before."""
        self._is_busy = False

    async def answer(self, request: Envelope, _: Sequence[Envelope]) -> list[Envelope]:
        """Take a stranger's offer, the first of each round; answer what is wrong with it."""
        made, sender = request.expect(Offer).contribution, request.sender
        why = self._gathering.reason(made)
        if not self._peer.trusted_part("replica").admits(sender):
            why = "this peer is not admitted to the run, which it asks for every 10 s"
        elif made.trainer != sender or self._peer.run.manifest.is_trainer(sender):
            why = "a stranger offers its own contribution; a trainer announces it in its status"
        elif sender not in self.offers or self.offers[sender].base_round < made.base_round:
            self.offers[sender] = made
            self._came[sender] = self._peer.node.world.now()
            self._loop.changed.touch()
        refusal = AdmissionRefused(peer=sender, reason=why[:500])
        return [await self._peer.seal(refusal, EVENT_LIFETIME_SECONDS)] if why else []

    async def run(self, child: OuterService, bytes_max: int) -> None:
        """Score what strangers offer, until cancelled. Raises `ChildDied`."""
        async with self._peer.messenger.answering({Offer: self.answer}):
            while True:
                chosen = self._choose()
                await self._drop_past()
                if not self._may_score() or self._following.is_behind():
                    await self._loop.changed.wait_change()
                    continue
                if not chosen:
                    with trio.move_on_after(self._speak()):
                        await self._loop.changed.wait_change()
                    continue
                self._is_busy, is_scored = True, False
                try:
                    async with alongside(until=self._is_behind):
                        await self._score(chosen, child, bytes_max)
                        is_scored = True
                finally:
                    self._is_busy = False
                if not is_scored:  # they are chosen again, unless the round is over
                    self._tried = {k: v for k, v in self._tried.items() if v not in chosen}
                self._loop.changed.touch()

    def _speak(self) -> float:
        """Say what was measured of the round's contributions, for the other trainers; or return the
        seconds until then, while a stranger is waited for."""
        ready_at = self._gathering.ready(self._round)[self._peer.peer_id][1]
        left = ready_at + self._peer.run.manifest.outer.grace_seconds - self._peer.node.world.now()
        if left > 0 and self._missing():
            return left
        said = self._round, list(self._scores.values())
        if self._loop.presence.own != said:
            self._loop.presence.own = said
            self._loop.changed.touch()
        return math.inf

    async def _is_behind(self) -> None:
        """Wait until there is a record to merge, which waits while its state is being read."""
        while not self._following.is_behind():
            await self._loop.changed.wait_change()

    async def _drop_past(self) -> None:
        """Delete what was chosen in earlier rounds, unless the round's record lists it."""
        state, chain, store = self._following.state, self._loop.chain, self._peer.store
        for made in [each for each in self._fetched if each.base_round < state.round]:
            self._fetched.remove(made)
            self._gathering.forget(made)
            link = chain.get(chain.ancestor(state.record, made.base_round + 1) or b"")
            if link is None or made not in link.record.contributions:
                # By its own name: it may have named another one's files.
                key = contribution_key(made.trainer, made.base, made.base_round)
                await store.discard(key)
                await store.withdraw(key)

    def _scorers(self) -> list[str]:
        """The trainers that are to score the present round, as far as they are present."""
        run, present = self._peer.run, self._loop.presence.present()
        ranked = ranking(tuple(run.manifest.trainer_ids()), run.id, self._following.state.round + 1)
        return [each for each in ranked if each in present][:SCORERS]

    def _may_score(self) -> bool:
        """Whether it is this trainer's turn to score, and its own inner steps are done."""
        own = self._peer.peer_id
        held = self._gathering.ready(self._round).get(own)
        return held is not None and held[0].base == self._round and own in self._scorers()

    def _known(self) -> dict[str, Rated]:
        """The ratings that the present round begins from."""
        link = self._loop.chain.get(self._following.state.record)
        return {each.trainer: each for each in link.record.rated} if link is not None else {}

    def _tokens(self) -> int:
        """The median of the named trainers' tokens: who trains on far fewer learns by heart
        the few sequences on which its gain is then measured."""
        ready = self._gathering.ready(self._round).values()
        return median_low([made.tokens for made, _ in ready if made.base == self._round] or [0])

    def _choose(self) -> list[Contribution]:
        """The offers that may be fetched now, in the order in which they came."""
        if self._round != self._following.state.record:
            self._round, self._scores, self._tried = self._following.state.record, {}, {}
        known, most = self._known(), self._peer.run.manifest.outer.strangers_max
        heavy = {each for each, heavy in weights(list(known.values())).items() if heavy}
        newcomers = max(1, int(most * NEWCOMERS_SHARE)) - len(self._tried.keys() - heavy)
        tokens = self._tokens()
        waiting = [
            each
            for each, made in self.offers.items()
            if made.base == self._round and each not in self._tried and 2 * made.tokens >= tokens
        ]
        # Who has shown least comes last, so that a flood of keys is paid for once per key. Of
        # equals all scorers choose the same, or no newcomer would have a majority of them.
        waiting.sort(key=lambda each: blake3(self._round + each.encode()).digest())
        waiting.sort(key=lambda each: -known[each].gain_rating if each in known else 0)
        # Nor do newcomers that give their files slowly delay the others' scores.
        chosen = [each for each in waiting if each in heavy]
        chosen = chosen or [each for each in waiting if each not in heavy][: max(0, newcomers)]
        chosen = chosen[: max(0, most - len(self._tried))]
        return [made for each, made in self.offers.items() if each in chosen]

    async def _score(
        self, chosen: Sequence[Contribution], child: OuterService, bytes_max: int
    ) -> None:
        """Fetch, check and score contributions; one that does not come in time is left out."""
        self._tried |= {each.trainer: each for each in chosen}
        self._fetched += chosen
        with trio.move_on_after(self._peer.run.manifest.outer.grace_seconds * FETCH_SHARE):
            async with trio.open_nursery() as nursery:
                for made in chosen:
                    take = self._gathering.take_stranger
                    nursery.start_soon(take, made, self._round, child, bytes_max)
        state, artifacts = self._following.state, self._loop.artifacts
        found = [each for each in chosen if self._gathering.holds(each)]
        async with self._following.moving:
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
            draw = self._peer.node.world.random.randbytes(
                32
            )  # nobody can try hashes until one suits
            job = ScoreRound(state=artifacts.local(at), named=named, strangers=offered, draw=draw)
            results = await child.score(job)
        if self._following.state.record != state.record:
            return
        for made, each in zip(found, results, strict=bool(results)):
            one = Measured(made.trainer, made.artifact.digest, each.gain, each.own)
            self._scores[made.trainer] = one
            why = each.problem
            if not why and each.gain <= FALLS:
                why = "it raises the loss of sequences that it did not know"
            elif not why and each.own <= 0:
                why = (
                    "the sequences that it was assigned gain no more than others; replica.data, "
                    "weights, sequence_tokens and validation_sequences must be the trainers'"
                )
            if why:
                self._gathering.refuse(made, why)

    def _missing(self) -> set[str]:
        """Strangers to wait for: those that contributed to the last round, and once each of those
        that offered a little too late for it."""
        now, grace = self._following.state.round, self._peer.run.manifest.outer.grace_seconds
        until = self._following.since + grace * LATE_SHARE
        late = [each for each, made in self.offers.items() if made.base_round + 1 == now]
        late = [each for each in late if self._came[each] <= until]
        late = [each for each in late if self._awaited.of(each, lambda: now) == now]
        known = {each for each, rated in self._known().items() if rated.gain > 0}
        return known.union(late) - self._tried.keys()

    def wait_seconds(self) -> float:
        """How much longer than without strangers a round may stay open now: while an offer is not
        scored, a stranger is waited for, or a scorer that has contributed has not spoken."""
        waits = self._is_busy or bool(self._choose()) or not self._may_score()
        ready = self._gathering.ready(self._round).items()
        scorers = {each for each, (made, _) in ready if made.base == self._round}
        scorers.intersection_update(self._scorers())
        spoken = measured(self._loop, self._round, self._following.state.round + 1)
        waits = waits or bool(self._missing()) or not scorers <= spoken.keys()
        return self._peer.run.manifest.outer.grace_seconds if waits else 0.0

    def rated(self) -> tuple[list[Rated], list[Contribution]]:
        """The ratings after the present round, and the contributions that weigh something."""
        self._choose()  # the round may have changed
        found = agreed(measured(self._loop, self._round, self._following.state.round + 1).values())
        scores = {each: (one.gain, one.own) for each, one in found.items()}
        rated = rate(list(self._known().values()), scores)
        heavy = weights(rated)
        return rated, [
            made
            for each, made in self._tried.items()
            if heavy.get(each)
            and any(scores.get(each, ()))
            and made.artifact.digest == found[each].artifact
            and self._gathering.holds(made)
        ]


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
