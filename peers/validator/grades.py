"""Grades of served environments, which an environment peer gives."""

from __future__ import annotations

from collections.abc import Sequence

import trio

from peers.validator.cases import Case
from swarm.envelope import EVENT_LIFETIME_SECONDS, Envelope
from swarm.errors import PeerError
from swarm.identity import PeerId
from swarm.jobs.validation import PartlyGraded, ServedEpisode
from swarm.messenger import first
from swarm.node.run_node import RunNode
from swarm.observable import complain
from swarm.rollouts.seeds import rendezvous
from swarm.turns import EpisodeGrade, EpisodeTokens, GradeRequest, TurnRefused, divided, pack

GRADES_AT_ONCE = 16
"""Episodes that one validator lets be graded at a time."""

GRADE_SECONDS = 60.0
"""Deadline of one request. An environment peer gives up a call after its own `seconds_max`."""

PAUSE_SECONDS = 1.0
"""Pause after all environment peers have failed to answer."""


class Ungraded(PeerError):
    """No environment peer can grade a submission; the message says why."""

    def __init__(self, message: str, *, not_gradable: bool = False) -> None:
        super().__init__(message)
        self.not_gradable = not_gradable
        """Whether the environment says so."""


class ServedGrades:
    """Asks environment peers for grades."""

    def __init__(self, peer: RunNode) -> None:
        self._peer = peer

    async def complete(
        self, case: Case, seed: bytes, partly: PartlyGraded, deadline_seconds: float
    ) -> None:
        """Add the grades of a submission's served episodes.

        Raises `Ungraded` if an episode has no grade, or all have none within the deadline.
        """
        results: dict[tuple[int, int], EpisodeGrade] = {}
        failed: list[Exception] = []
        reasons: dict[str, None] = {}
        waiting = iter(partly.episodes)

        async def ask_some(nursery: trio.Nursery) -> None:
            for episode in waiting:  # shared by all tasks
                try:
                    grade = await self._grade(case, seed, episode, reasons)
                except Ungraded as error:
                    failed.append(error)
                    nursery.cancel_scope.cancel()
                    return
                results[episode.group, episode.sample] = grade

        def say(seconds: float) -> None:
            peers = self._peer.run.manifest.environment_ids()
            why = f"no environment peer grades step {case.submission.step}: {_last(reasons)}"
            self._peer.say_starved("validator", seconds, why, peers)

        with trio.move_on_after(deadline_seconds):
            async with trio.open_nursery() as complaining:
                complaining.start_soon(complain, say)
                async with trio.open_nursery() as nursery:
                    for _ in range(min(GRADES_AT_ONCE, len(partly.episodes))):
                        nursery.start_soon(ask_some, nursery)
                complaining.cancel_scope.cancel()
        if failed:
            raise failed[0]
        if len(results) < len(partly.episodes):
            raise Ungraded(
                f"no environment peer graded it within {deadline_seconds:g} s: {_last(reasons)}"
            )
        for episode in partly.episodes:
            grade = results[episode.group, episode.sample]
            partly.graded[episode.group].append(grade.reward)
            partly.penalties[episode.group].append(grade.penalty)
            partly.has_target |= grade.has_target

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


def _last(reasons: dict[str, None]) -> str:
    return next(reversed(reasons), "none has answered")
