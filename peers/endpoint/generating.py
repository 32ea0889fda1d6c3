"""Generates what a job asks for, choice by choice, and hands out what is sampled."""

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import trio

from peers.endpoint.errors import ApiError
from peers.endpoint.jobs import Job
from peers.endpoint.policy import Policy
from peers.endpoint.recording import Sessions
from peers.endpoint.replies import Delta
from peers.endpoint.sampling import Driver, Sampled, Text, sample
from peers.endpoint.sessions import Draw, Turn
from peers.endpoint.structure import Structures
from peers.endpoint.tools import Call, CallForm, answer_of
from peers.engines.engine import Request
from swarm.errors import UserError

TellDelta = Callable[[Delta], Awaitable[None]]


@dataclass(frozen=True)
class Begun:
    """A job whose prompts are rendered and whose episodes are chosen."""

    job: Job
    turns: Sequence[Turn]
    """One per choice."""
    limits: Sequence[int]
    """Most tokens of each choice."""
    prompt_tokens: int
    """Tokens of the prompts; one that several choices share counts once."""

    def abandon(self) -> None:
        """Forget the choices that were not generated."""
        for turn in self.turns:
            turn.give_up()


@dataclass(frozen=True)
class Generator:
    """Serves jobs on one engine."""

    policy: Policy
    driver: Driver
    sessions: Sessions
    tokens_max: int
    """Most tokens of one choice."""
    structures: Structures
    counted: Counter[str] = field(
        default_factory=lambda: Counter(choices=0, prompt_tokens=0, generated_tokens=0)
    )
    """Sums since the start, for `/metrics`."""

    def begin(self, job: Job) -> Begun:
        """Choose the episodes of a job; raises `ApiError` for one that cannot be served."""
        if job.structure and not self.policy.capabilities.masks:
            raise ApiError(
                f"the engine {self.policy.capabilities.name} cannot keep to a schema or force a "
                "call; leave response_format out, and tool_choice at auto",
                param="response_format",
                code="unsupported_parameter",
            )
        name, now = job.session or job.id, trio.current_time()
        forget = job.session is None and self.sessions.folder is None
        session = self.sessions.session(name, now, forget)
        turns: list[Turn] = []
        lengths: list[int] = []
        limits: list[int] = []
        try:
            for prompt in [each for each in job.prompts for _ in range(job.n)]:
                turns.append(session.begin(prompt, is_structured=job.structure is not None))
                lengths.append(len(turns[-1].tokens))
                limits.append(self._limit(job, lengths[-1]))
        except BaseException as error:
            for turn in turns:
                turn.give_up()
            if not session.episodes:
                self.sessions.close(session)
            if isinstance(error, UserError | ValueError):
                raise ApiError(str(error)) from error
            raise
        return Begun(job, turns, limits, sum(lengths[:: job.n]))

    def _limit(self, job: Job, prompt: int) -> int:
        room = self.policy.length_max - prompt
        limit = job.limit if job.limit is not None else min(self.tokens_max, max(1, room))
        if limit > self.tokens_max:
            raise ApiError(
                f"max_tokens is {limit}; this endpoint generates at most {self.tokens_max} tokens "
                "for one choice",
                param="max_tokens",
            )
        if limit > room:
            raise ApiError(
                f"the prompt has {prompt} tokens and {limit} more are wanted, but the model's "
                f"context has {self.policy.length_max}; shorten the prompt, or lower max_tokens",
                code="context_length_exceeded",
            )
        return limit

    async def run(self, begun: Begun, tell: TellDelta | None = None) -> list[Delta]:
        """Generate all choices; raises `ApiError`. Cancelling gives them up."""
        found: dict[int, Delta] = {}
        failed: list[ApiError] = []

        async def make(index: int) -> None:
            try:
                sampled = await self._choice(begun, index, tell)
                text, calls = answer_of(sampled.text, sampled.finish, begun.job.calls)
                values = sampled.log_probabilities
                found[index] = Delta(index, text, sampled.tokens, values, sampled.finish, calls)
            except (ApiError, ValueError, UserError) as error:
                failed.append(error if isinstance(error, ApiError) else ApiError(str(error)))
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for index in range(len(begun.turns)):
                nursery.start_soon(make, index)
        if failed:
            raise failed[0]
        return [found[index] for index in sorted(found)]

    async def _choice(self, begun: Begun, index: int, tell: TellDelta | None) -> Sampled:
        job, turn = begun.job, begun.turns[index]
        row, start = turn.episode.row, turn.episode.sampled
        if job.key is not None:  # then equal requests have equal replies
            row, start = index, 0
        draw = Draw(
            key=None if job.temperature == 0 else job.key or turn.session.key,
            temperature=job.temperature or 1.0,
            row=row,
            start=start,
        )
        request = Request(
            id=-1,
            tokens=turn.tokens,
            row=row,
            noise_key=draw.key,
            temperature=draw.temperature,
            stop_ids=job.stop_ids,
            limit=start + begun.limits[index],
            start=start,
            continues=turn.episode.last,
            keep=job.session is not None,
            mask=None
            if job.structure is None
            else await trio.to_thread.run_sync(
                self.structures.mask, job.structure, len(turn.tokens)
            ),
        )
        in_parts = tell is not None or bool(job.stops)
        sent = _Sent(index, tell, job.calls)
        text = Text(self.policy.renderer, job.stop_ids, job.stops)
        try:
            sampled = await sample(self.driver, request, text, in_parts=in_parts, tell=sent.tell)
        except BaseException:
            turn.give_up(began=True)
            raise
        with trio.CancelScope(shield=True):  # the episode is extended or not, never by half
            await trio.to_thread.run_sync(turn.end, sampled, draw)
        await sent.end(sampled)
        self.counted.update(
            choices=1, prompt_tokens=len(request.tokens), generated_tokens=len(sampled.tokens)
        )
        return sampled


@dataclass
class _Sent:
    """How much of a choice the client has."""

    index: int
    to: TellDelta | None
    calls: CallForm | None
    """How calls of tools are written, which the client gets at the end."""
    text: str = ""
    tokens: int = 0

    async def tell(self, found: Sampled, certain: str) -> None:
        if self.calls is not None:
            certain = certain[: self.calls.certain(certain)]
        if self.to is not None and len(certain) > len(self.text):
            await self._send(found, certain, None)

    async def end(self, found: Sampled) -> None:
        if self.to is not None:
            text, calls = answer_of(found.text, found.finish, self.calls)
            await self._send(found, text, found.finish, calls)

    async def _send(
        self, found: Sampled, text: str, finish: str | None, calls: Sequence[Call] = ()
    ) -> None:
        assert self.to is not None
        delta = Delta(
            self.index,
            text[len(self.text) :],
            found.tokens[self.tokens :],
            found.log_probabilities[self.tokens :],
            finish,
            calls,
        )
        self.text, self.tokens = text, len(found.tokens)
        await self.to(delta)
