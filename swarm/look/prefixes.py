"""Names that a person shortened: hashes and peer ids by how they begin or, as in logs, end."""

import difflib
from collections.abc import Iterable
from pathlib import Path

from swarm.errors import UserError
from swarm.wire.identity import id_in_home

PREFIX_MIN = 4
"""Fewest characters of a hash or peer id that are looked up."""


def resolve(prefix: str, names: Iterable[str], what: str, where: str = "the ledger") -> str:
    """The only name that begins with a prefix or, if none does, that ends with it.

    Logs write `…` before the end of an id. Raises a `UserError` that names near ones."""
    names, how = list(names), "begin"
    shown, prefix = prefix.startswith("…"), prefix.removeprefix("…")
    found = sorted({name for name in names if name.startswith(prefix) and not shown})
    if not found:
        how = "end"
        found = sorted({name for name in names if name.endswith(prefix)})
    if len(prefix) < PREFIX_MIN:
        raise UserError(
            f"{where} has no {what} {prefix!r}; give at least {PREFIX_MIN} characters"
            + _near(prefix, names)
        )
    if not found:
        raise UserError(
            f"{where} has no {what} {prefix!r}, and none that begins so, or ends so; compare it "
            "with where you have it from" + _near(prefix, names)
        )
    if len(found) > 1 and prefix not in found:
        some = ", ".join(found[:3])
        raise UserError(f"{len(found)} {what}s {how} with {prefix}: {some}; give more characters")
    return prefix if prefix in found else found[0]


def peers_beside(home: Path) -> dict[str, str]:
    """The ids of the peers whose homes are beside a home, by folder: a demo's `inference-1`."""
    try:
        folders = sorted(home.absolute().parent.iterdir())
    except OSError:
        return {}
    found = {folder.name: id_in_home(folder) for folder in folders}
    return {name: peer for name, peer in found.items() if peer is not None}


def _near(prefix: str, names: list[str]) -> str:
    """Names of which the longest part agrees with a mistyped prefix."""
    length = max(PREFIX_MIN, len(prefix))
    begins = {name[:length] for name in names}
    near = difflib.get_close_matches(prefix, sorted(begins), n=3, cutoff=0.75)
    return f" (near it: {', '.join(near)})" if near else ""
