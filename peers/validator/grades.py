"""Grades of served environments, which an environment peer gives."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import trio

from peers.validator.cases import Case
from peers.validator.checks.file import FAILURES_SECONDS_MAX
from swarm.errors import PeerError
from swarm.jobs.validation import Graded, ServedEpisode, UngradedGroup
from swarm.node.run_node import RunNode
from swarm.rollouts.seeds import rendezvous
from swarm.wire.envelope import EVENT_LIFETIME_SECONDS, Envelope
from swarm.wire.identity import PeerId
from swarm.wire.messenger import first
from swarm.wire.turns import EpisodeGrade, EpisodeTokens, GradeRequest, TurnRefused, divided, pack
from swarm.world.observable import complain
from swarm.world.tasks import alongside

GRADES_AT_ONCE = 16
"""Episodes that one validator lets be graded at a time."""

GRADE_SECONDS = 60.0
"""Deadline of one request. An environment peer gives up a call after its own `seconds_max`."""

PAUSE_SECONDS = 1.0
"""Pause after all environment peers have failed to answer."""


class Ungraded(PeerError):
    """No environment peer can grade an episode; the message says why."""

    def __init__(self, message: str, *, not_gradable: bool = False) -> None:
        super().__init__(message)
        self.not_gradable = not_gradable
        """Whether the environment says so."""


@dataclass
class _Found:
    """What environment peers have answered about one submission."""

    grades: dict[tuple[int, int], EpisodeGrade] = field(default_factory=dict)
    """By group and sample."""
    ungraded: dict[int, UngradedGroup] = field(default_factory=dict)
    stopped: Ungraded | None = None
    """Why no other group is graded."""
    reasons: dict[str, None] = field(default_factory=dict)
    """Why environment peers gave no grade yet, the newest last."""

    @property
    def last_reason(self) -> str:
        return next(reversed(self.reasons), "none has answered")

    def give_up(self, group: int, error: Ungraded) -> None:
        given_up = UngradedGroup(group=group, reason=str(error), not_gradable=error.not_gradable)
        self.ungraded.setdefault(group, given_up)


class ServedGrades:
    """Asks environment peers for grades."""

    def __init__(self, peer: RunNode) -> None:
        self._peer = peer

    async def complete(
        self, case: Case, seed: bytes, graded: Graded, deadline_seconds: float
    ) -> None:
        """Add served episodes' grades; a group with one that fails or is late stays ungraded."""
        found = _Found()
        waiting = iter(graded.episodes)

        def say(seconds: float) -> None:
            peers = self._peer.run.manifest.environment_ids()
            why = f"no environment peer grades step {case.submission.step}: {found.last_reason}"
            self._peer.say_starved("validator", seconds, why, peers)

        with trio.move_on_after(deadline_seconds):
            async with alongside(partial(complain, say)), trio.open_nursery() as nursery:
                for _ in range(min(GRADES_AT_ONCE, len(graded.episodes))):
                    nursery.start_soon(self._ask, case, seed, waiting, found, nursery)
        late = found.stopped or Ungraded(
            f"no environment peer graded it within {deadline_seconds:g} s: {found.last_reason}"
        )
        for episode in graded.episodes:
            grade = found.grades.get((episode.group, episode.sample))
            if grade is None:
                found.give_up(episode.group, late)
                continue
            graded.graded[episode.group].append(grade.reward)
            graded.penalties[episode.group].append(grade.penalty)
            graded.parts[episode.group].append(grade.parts)
            graded.has_target |= grade.has_target
        graded.ungraded.extend(found.ungraded.values())

    async def _ask(
        self,
        case: Case,
        seed: bytes,
        waiting: Iterator[ServedEpisode],
        found: _Found,
        nursery: trio.Nursery,
    ) -> None:
        """Have one episode after the other graded; several tasks share `waiting`."""
        for episode in waiting:
            if episode.group in found.ungraded:
                continue
            begun = self._peer.node.world.now()
            try:
                grade = await self._grade(case, seed, episode, found.reasons)
            except Ungraded as error:
                found.give_up(episode.group, error)
                if self._peer.node.world.now() - begun > FAILURES_SECONDS_MAX:
                    found.stopped = error  # other groups would take as long
                    nursery.cancel_scope.cancel()
                continue
            found.grades[episode.group, episode.sample] = grade

    async def _grade(
        self, case: Case, seed: bytes, episode: ServedEpisode, reasons: dict[str, None]
    ) -> EpisodeGrade:
        """Ask one environment peer after the other until one has graded an episode."""
        while True:
            ranked = rendezvous(self._peer.run.manifest.environment_ids(), seed)
            for name in ranked:
                try:
                    reply = await self._request(PeerId(name), case, episode)
                except PeerError as error:
                    reasons[str(error)] = None
                    continue
                grade, refusal = first(reply, EpisodeGrade), first(reply, TurnRefused)
                if grade is not None and grade.sender == name:
                    found = grade.expect(EpisodeGrade)
                    if found.not_gradable:
                        raise Ungraded(found.not_gradable, not_gradable=True)
                    return found
                if refusal is not None:
                    refused = refusal.expect(TurnRefused)
                    if not refused.later:
                        raise Ungraded(f"environment peer {name} gives no grade: {refused.reason}")
                    reasons[f"{name}: {refused.reason}"] = None
            await trio.sleep(PAUSE_SECONDS)

    async def _request(
        self, peer: PeerId, case: Case, episode: ServedEpisode
    ) -> Sequence[Envelope]:
        submission = case.submission
        parts = divided(pack(token for segment in episode.segments for token in segment))
        request = GradeRequest(
            worker=case.worker,
            lineage=submission.lineage,
            step=submission.step,
            number=submission.number,
            entry=submission.entry,
            group=episode.group,
            sample=episode.sample,
            lengths=[len(segment) for segment in episode.segments],
            tokens=parts[0],
        )
        messages = [request, *(EpisodeTokens(tokens=part) for part in parts[1:])]
        await self._peer.node.reach(peer)
        return await self._peer.messenger.request(
            peer,
            *[await self._peer.seal(each, EVENT_LIFETIME_SECONDS) for each in messages],
            case.ordered,  # a restarted environment peer does not know it
            deadline_seconds=GRADE_SECONDS,
        )
