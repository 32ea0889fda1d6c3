"""Hidden tests in the forms that public data sets give them, and whether results pass them."""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Mapping
from decimal import Decimal
from functools import cached_property
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from peers.environments.interface import NotGradable
from swarm.errors import DECODE_ERRORS

TESTS_MAX = 1000
TESTS_BYTES_MAX = 16 << 20
"""All inputs and outputs of a task as JSON."""
RESULT_BYTES = 1 << 16
"""What a program may print in any case; more where the task expects more."""
RELATIVE = Decimal("1e-6")
"""Distance from an expected number with a decimal point, as in most contests."""
FROM_ZERO = 1e-9
"""Distance of a returned number from an expected 0.0, which rounding explains."""
NUMBER_CHARACTERS_MAX = 64
NESTING_MAX = 4

CONTAINERS = ("tests", "test_cases", "input_output", "ground_truth")
"""Keys under which records keep their tests, as a table, a list of cases, or JSON of either."""
_INPUTS, _OUTPUTS = ("input", "inputs", "stdin"), ("output", "outputs", "expected_output", "stdout")
_FUNCTIONS = ("fn_name", "func_name", "function_name", "entry_point")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,4})?", re.ASCII)
_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)


class Tests(msgspec.Struct, frozen=True, dict=True):
    """Hidden tests, in the one form that the sandbox knows."""

    inputs: Annotated[list[Any], Meta(min_length=1, max_length=TESTS_MAX)]
    """Standard input of each test; with `fn_name`, what `_call` makes of its arguments."""
    outputs: list[Any]
    """What a right program prints, as text; with `fn_name`, what the function returns."""
    fn_name: str = ""
    """The function or method to call; empty for a program that reads standard input."""

    @cached_property
    def _bytes(self) -> list[int]:
        return [len(canonical(output)) for output in self.outputs]

    @property
    def result_bytes(self) -> int:
        """Most bytes of one result: more than a right one can have."""
        return max(RESULT_BYTES, 2 * max(self._bytes) + 1024)

    @property
    def all_results_bytes(self) -> int:
        """Most bytes of all results together."""
        return max(1 << 20, 2 * sum(self._bytes) + 1024 * len(self._bytes))

    def passed_by(self, results: list[str]) -> bool:
        """Whether the results, one text for each test, are what the tests expect."""
        try:
            if not self.fn_name:
                return all(map(prints, results, self.outputs))
            values = [json.loads(result) for result in results]
        except (ValueError, RecursionError):
            return False
        if all(map(returns, values, self.outputs)):
            return True
        # Some data sets wrap each expected value into a list of one.
        wrapped = all(isinstance(each, list) and len(each) == 1 for each in self.outputs)
        return wrapped and all(map(returns, values, [each[0] for each in self.outputs]))


def canonical(value: Any) -> str:
    """A value as JSON without spaces."""
    return json.dumps(value, separators=(",", ":"))


def read_tests(given: Any, function: str = "") -> Tests:
    """The tests in a value of a task; `function` is the one to call unless the tests name one.

    A table of `inputs` and `outputs`, a list of cases, JSON of either, or a table that holds one
    of these under a key of `CONTAINERS`. Raises `NotGradable`.
    """
    try:
        table = _table(given)
        name = next((table[key] for key in _FUNCTIONS if table.get(key)), function)
        tests = msgspec.convert({**table, "fn_name": str(name).rpartition(".")[2]}, Tests)
        size = len(canonical([tests.inputs, tests.outputs]))
    except (*DECODE_ERRORS, ValueError, TypeError, RecursionError) as error:
        raise NotGradable(
            f"the task's tests {given!r:.80} are unreadable ({error}); they must be a table with "
            "inputs and outputs, and fn_name for a function"
        ) from error
    if len(tests.inputs) != len(tests.outputs):
        raise NotGradable(
            f"the task's tests have {len(tests.inputs)} inputs and {len(tests.outputs)} outputs; "
            "repair the data"
        )
    if size > TESTS_BYTES_MAX:
        raise NotGradable(
            f"the task's tests take {size} bytes; at most {TESTS_BYTES_MAX} are run, so leave out "
            "the largest"
        )
    if tests.fn_name:
        return Tests([_call(each) for each in tests.inputs], tests.outputs, tests.fn_name)
    return Tests([_text(each) for each in tests.inputs], [_text(each) for each in tests.outputs])


def _table(given: Any) -> dict[str, Any]:
    for _ in range(NESTING_MAX):
        if isinstance(given, str):
            given = json.loads(given)
        elif isinstance(given, Mapping) and not ("inputs" in given and "outputs" in given):
            inner = next((given[key] for key in CONTAINERS if key in given), None)
            if inner is None:
                break
            given = inner
        else:
            break
    if isinstance(given, (list, tuple)):
        given = {
            "inputs": [_first(case, _INPUTS) for case in given],
            "outputs": [_first(case, _OUTPUTS) for case in given],
            "fn_name": next((name for case in given if (name := _function(case))), ""),
        }
    if not isinstance(given, Mapping):
        raise TypeError("neither a table nor a list of cases")
    return dict(given)


def _first(case: Any, keys: tuple[str, ...]) -> Any:
    found = [case[key] for key in keys if key in case]
    if not found:
        raise ValueError(f"a case has no {keys[0]}")
    return found[0]


def _function(case: Any) -> str:
    return next((str(case[key]) for key in _FUNCTIONS if case.get(key)), "")


def _text(given: Any) -> str:
    """Standard input or output: text, a number, or a list of lines of either."""
    if isinstance(given, list):
        lines = [
            " ".join(map(_text, line)) if isinstance(line, list) else _text(line) for line in given
        ]
        return "".join(line.removesuffix("\n") + "\n" for line in lines)
    if isinstance(given, Mapping):
        raise NotGradable(
            f"the task's tests have {given!r:.60} as standard input or output; it must be text or "
            "a list of lines"
        )
    return "" if given is None else str(given)


def _call(given: Any) -> dict[str, Any]:
    """How the harness calls the function: `args` or `kwargs`.

    Text holds one argument a line as JSON or as Python writes it, or all in one list: then `either`
    is that list, which is spread unless the function takes one argument.
    """
    if isinstance(given, str):
        try:
            args = [_value(line) for line in given.split("\n") if line.strip()]
        except ValueError:
            return {"args": [given]}
        if len(args) == 1 and isinstance(args[0], list):
            return {"either": args[0]}
        return {"args": args}
    if isinstance(given, Mapping):
        return {"kwargs": given}
    return {"args": given if isinstance(given, list) else [given]}


def _value(text: str) -> Any:
    """A value in JSON or as Python writes it; raises `ValueError`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        value = ast.literal_eval(text.strip())
        return json.loads(json.dumps(value))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(f"{text!r:.60} is no value") from error


def returns(value: Any, expected: Any) -> bool:
    """Whether a returned value is the expected one, or the one that an expected text writes."""
    if _agree(value, expected):
        return True
    if not isinstance(expected, str) or (isinstance(value, str) and expected[:1] != '"'):
        return False
    try:
        return _agree(value, _value(expected))
    except ValueError:
        return False


def _agree(value: Any, expected: Any) -> bool:
    """Equality as JSON has it, where 3 and 3.0 are equal, true and 1 are not, and a number that is
    expected with a decimal point may be off by rounding."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, (int, float)) and isinstance(expected, float):
        distance = FROM_ZERO if expected == 0 else float(RELATIVE) * abs(expected)
        if abs(value) > sys.float_info.max:  # a whole number that is no float
            return value == expected
        return value == expected or abs(value - expected) <= distance < float("inf")
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(_agree, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(
            _agree(value[key], expected[key]) for key in value
        )
    return bool(value == expected)


def prints(printed: str, expected: str) -> bool:
    """Whether printed text is the expected one, word by word; spacing is not part of a task."""
    words, wanted = printed.split(), expected.split()
    if words == wanted:
        return True
    return len(words) == len(wanted) and all(map(_word_agrees, words, wanted))


def _word_agrees(word: str, expected: str) -> bool:
    """Whether two words are equal, or numbers one of which has a decimal point that differ by
    rounding only. Whole numbers are compared as texts: `007` may be a code."""
    if word == expected:
        return True
    if max(len(word), len(expected)) > NUMBER_CHARACTERS_MAX:
        return False
    if not (_NUMBER.fullmatch(word) and _NUMBER.fullmatch(expected)):
        return False
    if _INTEGER.fullmatch(expected):
        return not _INTEGER.fullmatch(word) and Decimal(word) == Decimal(expected)
    value, wanted = Decimal(word), Decimal(expected)
    exponent = wanted.as_tuple().exponent
    # The last of six decimals or more was rounded.
    last = Decimal(1).scaleb(exponent) if isinstance(exponent, int) and exponent <= -6 else 0
    return abs(value - wanted) <= max(abs(wanted) * RELATIVE, last)
