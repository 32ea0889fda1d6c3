"""The program inside the sandbox that calls a solution once for each input.

Each call happens in a process of its own, so that no call learns from another. It prints one JSON
list of results. It knows no expected result: a solution that takes over this program can forge
results, but not right ones. It imports little, because every program waits for it.
"""

from __future__ import annotations

import json
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

RESULT_BYTES_MAX = 1 << 16


def nameless_file() -> int:
    """A descriptor of an empty file in the working folder that nobody else can open."""
    return os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o600)


def call(function: str, source: str, given: Any, result: int) -> None:
    """Run the solution on one input and write its result to a file; this process ends afterwards.

    `given` holds the function's arguments, or the text of standard input if there is no function.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    code = compile(source, "solution.py", "exec", dont_inherit=True)
    if not function:
        stdin = nameless_file()
        with open(stdin, "wb", closefd=False) as file:
            file.write(given.encode())
        os.lseek(stdin, 0, os.SEEK_SET)
        os.dup2(stdin, 0)
        os.dup2(result, 1)
        sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
        try:
            exec(code, namespace)
        except SystemExit as end:
            if end.code:
                raise
        sys.stdout.flush()
        return
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    exec(code, namespace)
    value = namespace[function](*given)
    with open(result, "wb", closefd=False) as file:
        file.write(json.dumps(value, separators=(",", ":")).encode())


def attempt(function: str, source: str, given: Any) -> str | None:
    """The result of one call, or None if it failed."""
    result = nameless_file()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            call(function, source, given, result)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    raw = os.pread(result, RESULT_BYTES_MAX, 0)
    os.close(result)
    return None if status else raw.decode("utf-8", "replace")


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    results: list[str] = []
    for given in request["inputs"]:
        result = attempt(request["function"], request["source"], given)
        if result is None:
            break
        results.append(result)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
