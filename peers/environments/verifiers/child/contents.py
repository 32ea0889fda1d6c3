"""What a distribution has for `verifiers`: `python -m …child.contents SITE [EXTRA…]` prints JSON.

Reads the only distribution in the folder SITE; runs none of its code."""

import json
import re
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

IMPORTS = re.compile(r"^\s*(import|from) verifiers\b", re.MULTILINE)
INTERFACES = {
    "0.3.1": re.compile(r"^(async )?def load_environment\(", re.MULTILINE),
    "0.4.0": re.compile(r"^class \w+\((\w+\.)*Taskset\b", re.MULTILINE),
}
"""What a module of each interface defines, by the version of the library that plays it."""

SOURCE_BYTES_MAX = 1 << 20


def contents(site: str, extras: list[str]) -> dict[str, Any]:
    """Version; what it needs beside verifiers; what it asks of that; modules, by interface."""
    (found,) = distributions(path=[site])
    needs, pinned, modules, imports = [], "", {}, False
    for line in found.requires or ():
        need = Requirement(line)
        if need.marker and not any(need.marker.evaluate({"extra": e}) for e in ("", *extras)):
            continue
        need.marker = None
        if need.name.lower() == "verifiers":
            pinned = str(need.specifier) or "any"
        else:
            needs.append(str(need))
    for file in found.files or ():
        path = Path(str(found.locate_file(file)))
        if file.suffix != ".py" or not path.is_file() or path.stat().st_size > SOURCE_BYTES_MAX:
            continue
        text = path.read_text("utf-8", "replace")
        if not IMPORTS.search(text):
            continue
        imports = True
        for library, interface in INTERFACES.items():
            if interface.search(text):
                parts = [*file.parts[:-1], file.stem]
                if file.stem in ("__init__", "taskset") and len(parts) > 1:
                    parts.pop()
                modules[".".join(parts)] = library
    return {
        "version": found.version,
        "needs": needs,
        "pinned": pinned,
        "imports": imports,
        "modules": modules,
    }


if __name__ == "__main__":
    print(json.dumps(contents(sys.argv[1], sys.argv[2:])))
