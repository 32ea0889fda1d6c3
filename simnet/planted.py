"""Bugs planted on purpose: whether the invariants find them is tested.

Each breaks production code in one place while a simulation runs (`--plant NAME`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import trio

import swarm.envelope
from peers.trainer.accepted import AcceptedSubmissions
from swarm.envelope import Envelope
from swarm.errors import UserError
from swarm.messages import Verdict
from swarm.run.trusted import VERDICT_LIFETIME_SECONDS, TrustedPart

LATE_SECONDS = 5.0
"""By which a forgetful validator's verdicts become durable too late."""

_Patch = tuple[Any, str, Any]


def _skip_signature_check() -> _Patch:
    """Envelopes are believed whatever their signature."""
    return swarm.envelope, "verify", lambda *_: True


def _forget_verdict() -> _Patch:
    """A validator announces its verdicts before they are durable."""
    right = TrustedPart.append_verdict

    async def append_verdict(self: TrustedPart, verdict_at: Callable[[int], Verdict]) -> Envelope:
        async def later() -> None:
            await trio.sleep(LATE_SECONDS)
            await right(self, verdict_at)

        verdict = verdict_at(self._log.size())
        nursery = self._peer.messenger._nursery
        assert nursery is not None
        nursery.start_soon(later)
        return await self._peer.seal(verdict, VERDICT_LIFETIME_SECONDS)

    return TrustedPart, "append_verdict", append_verdict


def _train_twice() -> _Patch:
    """A trainer that resumes forgets what its state has consumed."""
    return AcceptedSubmissions, "remember_consumed", lambda *_: 0


BUGS: dict[str, Callable[[], _Patch]] = {
    "skipped-signature-check": _skip_signature_check,
    "forgotten-verdict": _forget_verdict,
    "trained-twice": _train_twice,
}


def check_plant(name: str | None) -> None:
    """Raise `UserError` unless there is such a bug."""
    if name is not None and name not in BUGS:
        raise UserError(f"--plant {name!r}: there are: {', '.join(BUGS)}")


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Have this bug inside the block; none with None."""
    check_plant(name)
    if name is None:
        yield
        return
    place, attribute, wrong = BUGS[name]()
    right = getattr(place, attribute)
    setattr(place, attribute, wrong)
    try:
        yield
    finally:
        setattr(place, attribute, right)
