"""Findings of the checks that a person or a starting peer makes: a line each, fine or not."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import trio

from swarm.errors import SwarmError, leaf_errors
from swarm.run.run import Run
from swarm.sentences import numbered
from swarm.wire.messages import Checkpoint, StepOrder

State = Literal["fine", "advice", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of the screen."""

    topic: str
    text: str
    figures: dict[str, Any]
    """The same for programs."""
    problem: bool = False
    """Whether the peer cannot work like this, or not for long."""
    advice: bool = False
    """Whether it works, but the text says how it would work better."""

    @property
    def state(self) -> State:
        return "problem" if self.problem else "advice" if self.advice else "fine"


@dataclass(frozen=True)
class Work:
    """A run, as far as it is known."""

    run: Run
    checkpoint: Checkpoint | None = None
    order: StepOrder | None = None


def lines(findings: Sequence[Finding]) -> list[str]:
    """The screen, a line per finding."""
    words = {"fine": "", "advice": "ADVICE: ", "problem": "PROBLEM: "}
    return [f"{each.topic:<10} {words[each.state]}{numbered(each.text)}" for each in findings]


def figures(findings: Sequence[Finding]) -> dict[str, Any]:
    """The same as plain data, by topic."""
    return {each.topic: each.figures | {"problem": each.problem} for each in findings}


def attempt(topic: str, check: Callable[[], str]) -> Finding:
    """The line of a check that returns its result, or raises an error with the remedy."""
    try:
        return Finding(topic, check(), {})
    except SwarmError as error:
        return Finding(topic, str(error), {}, problem=True)


async def within(
    seconds: float, topic: str, check: Callable[[], Awaitable[Finding]], *, problem: bool = False
) -> Finding:
    """The line of a check that asks other peers, at the latest after `seconds`.

    `problem`: whether a check that fails or takes too long is a problem of this peer."""
    text = f"no answer within {seconds:g} s"
    with trio.move_on_after(seconds):
        try:
            return await check()
        except (SwarmError, BaseExceptionGroup) as error:
            leaves = leaf_errors(error)
            if not all(isinstance(leaf, SwarmError) for leaf in leaves):
                raise
            text = str(leaves[0])
    return Finding(topic, text, {}, problem=problem, advice=not problem)
