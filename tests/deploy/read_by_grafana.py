"""Reads a dashboard with Grafana's own types: `build/deploy/bin/python … FILE`.

Its environment has no package of Swarm. What the types do not know is lost on the way, and what
they refuse is an exception.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def lost(before: Any, after: Any, where: str) -> Iterator[str]:
    """Name what is missing or different in `after`."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key, value in before.items():
            yield from lost(value, after.get(key), f"{where}.{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (old, new) in enumerate(zip(before, after, strict=True)):
            yield from lost(old, new, f"{where}[{index}]")
    elif before != after:
        yield f"{where}: {before!r} became {after!r}"


def main() -> None:
    """Print what Grafana's types do not keep; exit status 1 if there is any."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    given = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    read = json.loads(JSONEncoder().encode(Dashboard.from_json(given)))
    sys.exit("\n".join(lost(given, read, "dashboard")) or 0)


if __name__ == "__main__":
    main()
