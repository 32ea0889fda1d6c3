"""Bugs planted on purpose: whether the invariants find them is tested.

Each breaks production code in one place while a simulation runs (`--plant NAME`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import swarm.envelope
from swarm.errors import UserError

_Patch = tuple[Any, str, Any]


def _skip_signature_check() -> _Patch:
    """Envelopes are believed whoever signed them."""
    return swarm.envelope, "verify", lambda *_: True


def _forget_verdict() -> _Patch:
    """A validator takes its verdicts for durable before they are."""
    raise NotImplementedError


def _train_twice() -> _Patch:
    """A trainer that resumes forgets what its state has consumed."""
    raise NotImplementedError


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
