"""Options of an option: `name=value` texts, because a run's options hold no tables."""

import json
from collections.abc import Iterable
from typing import Any

from swarm.errors import UserError

PAIR = r"^[^=]{1,200}=.+\Z"
"""Pattern of a text that `json_pairs` reads."""


def json_pairs(given: Iterable[str], where: str) -> dict[str, Any]:
    """Read `name=value` texts with values in JSON, of the option `where`; raises `UserError`."""
    found = {}
    for each in given:
        name, _, text = each.partition("=")
        try:
            found[name] = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{where} has {each!r:.100}, whose value is no JSON ({error}); write text in "
                'quotes, as in name="text"'
            ) from error
    return found
