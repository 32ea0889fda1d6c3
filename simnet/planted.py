"""Bugs planted on purpose, to test that the invariants find them.

Each breaks production code in one spot while a simulation runs (`--plant NAME`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import trio

import swarm.wire.envelope
from peers.trainer.accepted import AcceptedSubmissions
from swarm.errors import UserError
from swarm.node.trusted import VERDICT_LIFETIME_SECONDS, TrustedPart
from swarm.wire.envelope import Envelope
from swarm.wire.messages import Verdict

LATE_SECONDS = 5.0
"""Delay with which a forgetful validator makes its verdicts durable."""

_Patch = tuple[Any, str, Any]


def _skip_signature_check() -> _Patch:
    """Accept envelopes with any signature."""
    return swarm.wire.envelope, "verify", lambda *_: True


def _forget_verdict() -> _Patch:
    """Make validators announce verdicts before they are durable."""
    right = TrustedPart.append_verdict

    async def append_verdict(self: TrustedPart, verdict_at: Callable[[int], Verdict]) -> Envelope:
        async def later() -> None:
            await trio.sleep(LATE_SECONDS)
            await right(self, verdict_at)

        verdict = verdict_at(self._log.size())
        nursery = self._gossip._nursery
        assert nursery is not None
        nursery.start_soon(later)
        return await self._seal(verdict, VERDICT_LIFETIME_SECONDS)

    return TrustedPart, "append_verdict", append_verdict


def _train_twice() -> _Patch:
    """Make a resumed trainer forget the submissions that its state has consumed."""
    return AcceptedSubmissions, "remember_consumed", lambda *_: 0


BUGS: dict[str, Callable[[], _Patch]] = {
    "skipped-signature-check": _skip_signature_check,
    "forgotten-verdict": _forget_verdict,
    "trained-twice": _train_twice,
}


def check_plant(name: str | None) -> None:
    """Raise `UserError` unless there is such a bug."""
    if name is not None and name not in BUGS:
        raise UserError(f"--plant {name!r} is unknown; choose one of: {', '.join(BUGS)}")


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Plant this bug inside the block; None plants nothing."""
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
