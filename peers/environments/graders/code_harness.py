"""The program inside the sandbox that calls a solution once for each input.

Each call happens in a process of its own, so that no call learns from another. It prints one JSON
object with the results. It knows no expected result: a solution that takes over this program can
forge results, but not right ones. It imports little, because every program waits for it."""

from __future__ import annotations

import builtins
import json
import os
import resource
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import CodeType
    from typing import Any, TextIO

ANNOTATIONS_ARE_TEXT = annotations.compiler_flag
"""Type hints are not evaluated, so that they need no import."""

WALL_PER_CPU = 5.0
"""Wall time of a call, in units of its CPU time."""

MODULES = """array bisect cmath collections copy dataclasses datetime decimal enum fractions
functools heapq io itertools json math operator os random re statistics string sys time typing"""
NAMES = {
    "typing": """Any Callable DefaultDict Deque Dict FrozenSet Generator Generic Iterable Iterator
        List Mapping NamedTuple Optional Sequence Set Tuple Type TypeVar Union""",
    "collections": "ChainMap Counter OrderedDict defaultdict deque namedtuple",
    "functools": "cache cached_property cmp_to_key lru_cache partial reduce total_ordering wraps",
    "heapq": "heapify heappop heappush heappushpop heapreplace nlargest nsmallest",
    "itertools": """accumulate chain combinations combinations_with_replacement count cycle groupby
        islice pairwise permutations product repeat starmap takewhile dropwhile zip_longest tee
        filterfalse compress""",
    "bisect": "bisect_left bisect_right insort insort_left insort_right",
    "math": """acos asin atan atan2 ceil comb cos degrees dist e exp factorial floor gcd hypot inf
        isqrt lcm log log10 log2 perm pi prod radians sin sqrt tan""",
    "string": "ascii_letters ascii_lowercase ascii_uppercase digits punctuation",
    "copy": "deepcopy",
    "dataclasses": "dataclass field",
    "decimal": "Decimal",
    "enum": "Enum",
    "fractions": "Fraction",
    "operator": "attrgetter itemgetter",
    "random": "choice randint shuffle",
}
"""What solutions use without importing it, as the site of the problem does it for them."""


def nameless_file() -> int:
    """A descriptor of an empty file in the working folder that nobody else can open."""
    return os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_EXCL, 0o600)


def prelude(code: CodeType, function: str) -> dict[str, Any]:
    """The values of `MODULES` and `NAMES` that the code mentions, but for the task's function."""
    mentioned: set[str] = set()
    codes = [code]
    while codes:
        each = codes.pop()
        mentioned.update(each.co_names)
        codes += [constant for constant in each.co_consts if isinstance(constant, type(code))]
    found = {name: __import__(name) for name in mentioned.intersection(MODULES.split())}
    for module, names in NAMES.items():
        for name in mentioned.intersection(names.split()):
            found[name] = getattr(__import__(module), name)
    found.pop(function, None)
    return found


def finish(own: TextIO) -> None:
    """Wait for threads and call exit functions, as an interpreter does at the end."""
    if (threading := sys.modules.get("threading")) is not None:
        threading._shutdown()
    import atexit

    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.__stdout__, own):
        if stream is not None and not stream.closed:
            stream.flush()


def run(code: CodeType, namespace: dict[str, Any], given: str, result: int) -> None:
    """Run the solution with `given` as standard input, and what it prints as its result."""
    stdin = nameless_file()
    with open(stdin, "wb", closefd=False) as file:
        file.write(given.encode("utf-8", "replace"))
    os.lseek(stdin, 0, os.SEEK_SET)
    os.dup2(stdin, 0)
    os.dup2(result, 1)
    # The program may replace both; a file that nobody refers to would close its descriptor.
    own = sys.stdin, sys.stdout = open(0), open(1, "w")  # noqa: SIM115
    by_path = open
    builtins.open = lambda file, *rest, **named: by_path(  # type: ignore[assignment]
        0 if file == "/dev/stdin" else file, *rest, **named
    )
    try:
        exec(code, namespace)
    except SystemExit as end:
        if end.code:
            raise
    finish(own[1])


def found_in(namespace: dict[str, Any], function: str) -> Any:
    """The function, or the method of `Solution` or of the last class that has one."""
    if function in namespace:
        return namespace[function]
    own = [each for each in namespace.values() if isinstance(each, type)]
    own = [each for each in own if each.__module__ == namespace["__name__"]]
    for owner in sorted(reversed(own), key=lambda each: each.__name__ != "Solution"):
        if hasattr(owner, function):
            return getattr(owner(), function)
    raise NameError(function)


def takes_one(called: Any) -> bool:
    """Whether a function can be called with one argument, as far as its definition says."""
    bound = hasattr(called, "__self__")
    while hasattr(called, "__wrapped__"):
        called = called.__wrapped__
    inner = getattr(called, "__func__", called)
    if not hasattr(inner, "__code__"):
        return True
    return bool(inner.__code__.co_argcount - bound - len(inner.__defaults__ or ()) <= 1)


def unordered(value: object) -> object:
    """A set as JSON, in an order of its own."""
    if isinstance(value, (set, frozenset)):
        return {"set": sorted(json.dumps(each, default=unordered) for each in value)}
    raise TypeError(type(value))


def call(code: CodeType, namespace: dict[str, Any], function: str, given: Any, result: int) -> None:
    """Call the solution's function, and write what it returns as JSON."""
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    exec(code, namespace)
    called = found_in(namespace, function)
    args, named = given.get("args", ()), given.get("kwargs", {})
    if "either" in given:
        args = [given["either"]] if takes_one(called) else given["either"]
    elif "written" in given:
        import ast

        args, named = ast.literal_eval(given["written"])
    value = called(*args, **named)
    with open(result, "wb", closefd=False) as file:
        file.write(json.dumps(value, separators=(",", ":"), default=unordered).encode())


def behave(code: CodeType, names: dict[str, Any], request: Any, given: Any, result: int) -> None:
    """What the process of one call does."""
    cpu = int(-(-request["cpu_seconds"] // 1))
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (min(cpu, hard), min(cpu + 1, hard)))
    function = request["function"]
    # What stands below `if __name__ == "__main__"` reads standard input.
    module = type(sys)("solution" if function else "__main__")
    sys.modules[module.__name__] = module
    module.__dict__.update(names, __builtins__=builtins)
    if function:
        call(code, module.__dict__, function, given, result)
    else:
        run(code, module.__dict__, given, result)


def attempt(code: CodeType, names: dict[str, Any], request: Any, given: Any) -> tuple[str, str]:
    """The result of one call, and why it has none: empty, `failed` or `timeout`."""
    result = nameless_file()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            behave(code, names, request, given, result)
            status = 0
        finally:
            os._exit(status)
    late = False

    def end(*_: object) -> None:
        nonlocal late
        late = True
        os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, WALL_PER_CPU * request["cpu_seconds"])
    _, status, used = os.wait4(child, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    raw = os.pread(result, request["result_bytes"] + 1, 0)
    os.close(result)
    if late or used.ru_utime + used.ru_stime > request["cpu_seconds"]:
        return "", "timeout"
    failed = status or len(raw) > request["result_bytes"]
    return raw.decode("utf-8", "replace"), "failed" if failed else ""


def main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    # Contests' sites ran older versions of Python, which print whole numbers of any length.
    sys.set_int_max_str_digits(0)
    code = compile(request["source"], "solution.py", "exec", ANNOTATIONS_ARE_TEXT, True)
    names = prelude(code, request["function"])
    results: list[str] = []
    left, end = request["all_results_bytes"], ""
    for given in request["inputs"]:
        result, end = attempt(code, names, request, given)
        left -= len(result)
        if end or left < 0:
            break
        results.append(result)
    print(json.dumps({"results": results, "end": end}, ensure_ascii=False))


if __name__ == "__main__":
    main()
