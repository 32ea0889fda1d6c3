"""Names that a person shortened: hashes and peer ids by how they begin."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from swarm.errors import UserError

PREFIX_MIN = 4
"""Fewest characters of a hash or peer id that are looked up."""


def resolve(prefix: str, names: Iterable[str], what: str, where: str = "the ledger") -> str:
    """The only name that begins with a prefix; raises a `UserError` that names near ones."""
    names = list(names)
    found = sorted({name for name in names if name.startswith(prefix)})
    if len(prefix) < PREFIX_MIN:
        raise UserError(
            f"{where} has no {what} {prefix!r}; give at least {PREFIX_MIN} characters"
            + _near(prefix, names)
        )
    if not found:
        raise UserError(
            f"{where} has no {what} {prefix!r}, and none that begins so; compare it with where "
            "you have it from" + _near(prefix, names)
        )
    if len(found) > 1 and prefix not in found:
        some = ", ".join(found[:3])
        raise UserError(f"{len(found)} {what}s begin with {prefix}: {some}; give more characters")
    return prefix if prefix in found else found[0]


def _near(prefix: str, names: list[str]) -> str:
    """Names of which the longest part agrees with a mistyped prefix."""
    length = max(PREFIX_MIN, len(prefix))
    begins = {name[:length] for name in names}
    near = difflib.get_close_matches(prefix, sorted(begins), n=3, cutoff=0.75)
    return f" (near it: {', '.join(near)})" if near else ""
