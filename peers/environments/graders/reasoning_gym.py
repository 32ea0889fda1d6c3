"""The grader `reasoning-gym`: the scorers of its data sets, in processes of their own."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from peers.environments.graders import Grader, valid, zero
from peers.environments.graders.pool import Pool, ProcessFailed, ServiceError, pool_of
from peers.environments.interface import Grade, NotGradable
from swarm.errors import UserError

SERVICE = "peers.environments.graders.reasoning_service:ReasoningService"
VERSION = "0.1.25"
"""Another version may score otherwise."""


class ReasoningOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How scores become rewards."""

    partial: bool = False
    """Whether a score below 1 is a reward; most data sets give a little for any text."""


class ReasoningReply(msgspec.Struct, frozen=True):
    """The score of a text, or why it has none."""

    score: float = 0.0
    reason: str = ""


class ReasoningGym(Grader):
    """Rewards what a data set scores with 1: the last `<answer>…</answer>`, or the whole text."""

    name = "reasoning-gym"
    Options = ReasoningOptions
    options: ReasoningOptions

    def grade(self, text: str, answer: str, data: Mapping[str, Any]) -> Grade:
        """See `Grader.grade`.

        `data` holds the `metadata` of an entry, as the package wrote it.
        """
        request = {"text": answer_in(valid(text)), **_entry(answer, data)}
        try:
            reply = msgspec.convert(_pool().ask(request), ReasoningReply)
        except (ProcessFailed, ServiceError) as error:
            raise NotGradable(
                f"reasoning-gym cannot score {text[:80]!r} for {request['dataset']}: {error}"
            ) from error
        if reply.reason:
            return zero(reply.reason)
        reward = min(1.0, max(0.0, reply.score))
        return Grade(reward if self.options.partial else float(reward == 1))


def answer_in(text: str) -> str:
    """The last tagged answer in a completion, or the whole completion if it has none."""
    # A pattern for both tags takes quadratic time on a text of opening tags only.
    for closed in reversed(text.split("</answer>")[:-1]):
        _, opening, answer = closed.partition("<answer>")
        if opening:
            return answer.strip()
    return text.strip()


def _entry(answer: str, data: Mapping[str, Any]) -> dict[str, Any]:
    metadata = data.get("metadata")
    if isinstance(metadata, str):
        metadata = msgspec.json.decode(metadata)
    if not isinstance(metadata, dict) or "source_dataset" not in metadata:
        raise NotGradable(
            "the task has no metadata with source_dataset, as reasoning-gym writes it; map the "
            "column, or choose another grader"
        )
    entry = {"question": "", "answer": answer, "metadata": metadata}
    return {"dataset": metadata["source_dataset"], "entry": entry}


def _pool() -> Pool:
    """The processes; raises `UserError` when the package is missing or of another version."""
    try:
        found = version("reasoning-gym")
    except PackageNotFoundError:
        found = ""
    if found != VERSION:
        installed = f"version {found} is installed" if found else "which is not installed here"
        raise UserError(
            f"'reasoning-gym' needs the package reasoning-gym {VERSION}, {installed}; type: "
            "pip install 'swarm-rl[reasoning]'"
        )
    return pool_of(SERVICE)
