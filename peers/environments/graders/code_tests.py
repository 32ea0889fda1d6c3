"""Hidden tests in the one form that the sandbox knows, and whether results pass them."""

import ast
import json
import re
import sys
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import cached_property
from typing import Any

import msgspec

from peers.environments.graders import code_forms
from peers.environments.interface import NotGradable

TESTS_MAX = 10_000
RESULT_BYTES = 1 << 16
"""What a program may print in any case; more where the task expects more."""
RELATIVE = Decimal("1e-6")
"""Distance from an expected number with a decimal point, as in most contests."""
ABSOLUTE = Decimal("1e-6")
"""The same where six decimals or more are expected: contests ask for either."""
FROM_ZERO = 1e-9
"""Distance of a returned number from an expected 0.0, which rounding explains."""
NUMBER_CHARACTERS_MAX = 64

_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,4})?", re.ASCII)
_INTEGER = re.compile(r"[+-]?\d+", re.ASCII)


class Tests(msgspec.Struct, frozen=True, dict=True):
    """Hidden tests of a task."""

    inputs: Sequence[Any]
    """Standard input of each test; with `fn_name`, what `_call` makes of its arguments."""
    accepted: Sequence[Sequence[Any]]
    """What a right program prints, as text; with `fn_name`, what it returns. Of several any is
    right."""
    fn_name: str = ""
    """The function or method to call; empty for a program that reads standard input."""

    @cached_property
    def _bytes(self) -> list[int]:
        return [max(len(canonical(each)) for each in outputs) for outputs in self.accepted]

    @property
    def result_bytes(self) -> int:
        """Most bytes of one result: more than a right one can have."""
        return max(RESULT_BYTES, 2 * max(self._bytes) + 1024)

    @property
    def all_results_bytes(self) -> int:
        """Most bytes of all results together."""
        return max(1 << 20, 2 * sum(self._bytes) + 1024 * len(self._bytes))

    def between(self, start: int, end: int) -> "Tests":
        return Tests(self.inputs[start:end], self.accepted[start:end], self.fn_name)

    def passed_by(self, results: Sequence[str]) -> bool:
        """Whether the results, one text for each test, are what the tests expect."""
        try:
            given = [code_forms.loads(each) for each in results] if self.fn_name else results
        except (ValueError, RecursionError):
            return False
        agrees = returns if self.fn_name else prints
        return all(
            any(agrees(result, each) for each in outputs)
            for result, outputs in zip(given, self.accepted, strict=True)
        )


def canonical(value: Any) -> str:
    """A value as JSON without spaces."""
    return json.dumps(value, separators=(",", ":"), default=str)


def read_tests(data: Mapping[str, Any]) -> Tests:
    """The tests in a task's record, in any form of `code_forms`; raises `NotGradable`."""
    try:
        cases = code_forms.cases_in(data)
        if not 1 <= len(cases) <= TESTS_MAX:
            raise ValueError(f"there are {len(cases)}; 1 to {TESTS_MAX} can be run")
        names = {each.function for each in cases}
        if len({name is None for name in names}) > 1:
            raise ValueError("some call a function and others read standard input")
        name = next((each.function for each in cases if each.function), "").rpartition(".")[2]
        if name and not name.isidentifier():
            raise ValueError(f"{name!r:.60} names no function")
        tests = _tests(cases, name)
        size = len(json.dumps(tests.inputs)) + sum(tests._bytes)
    except (ValueError, TypeError, RecursionError) as error:
        raise NotGradable(
            f"the task's tests {dict(data)!r:.80} are unreadable ({error}); docs/environments.md "
            "lists the forms that are read"
        ) from error
    if size > code_forms.TESTS_BYTES_MAX:
        raise NotGradable(
            f"the task's tests take {size} bytes; at most {code_forms.TESTS_BYTES_MAX} are "
            "run, so leave out the largest"
        )
    return tests


def _tests(cases: Sequence[code_forms.Case], name: str) -> Tests:
    if not name:
        outputs = [[_text(output) for output in each.accepted] for each in cases]
        return Tests([_text(each.given) for each in cases], outputs)
    values = [list(each.accepted) for each in cases]
    # Some data sets wrap each expected value into a list of one.
    if all(len(each) == 1 and isinstance(each[0], list) and len(each[0]) == 1 for each in values):
        values = [[*each, each[0][0]] for each in values]
    return Tests([_call(each) for each in cases], values, name)


def _text(given: Any) -> str:
    """Standard input or output: text, a number, or a list of lines of either."""
    if isinstance(given, list):
        lines = [
            " ".join(map(_text, line)) if isinstance(line, list) else _text(line) for line in given
        ]
        return "".join(line.removesuffix("\n") + "\n" for line in lines)
    if isinstance(given, (Mapping, code_forms.Written)):
        raise ValueError(f"{given!r:.60} is no standard input or output; text or lines are")
    return "" if given is None else str(given)


def _call(case: code_forms.Case) -> dict[str, Any]:
    """How the harness calls the function: `args`, `kwargs`, or `written` as Python writes both.

    Text holds one argument a line as JSON or as Python writes it. A single list may also hold all
    arguments: then `either` is that list, which is spread unless the function takes one argument.
    """
    given = case.given
    if isinstance(given, code_forms.Written):
        return {"written": given.text}
    if isinstance(given, str):
        try:
            args = [_value(line) for line in given.split("\n") if line.strip()]
        except ValueError:
            return {"args": [given]}
        if len(args) == 1 and isinstance(args[0], list):
            return {"args": args[0]} if case.is_list_of_arguments else {"either": args[0]}
        return {"args": args}
    if isinstance(given, Mapping):
        return {"kwargs": given}
    return {"args": given if isinstance(given, list) else [given]}


def _value(text: str) -> Any:
    """A value in JSON or as Python writes it; raises `ValueError`."""
    try:
        return code_forms.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return code_forms.as_json(ast.literal_eval(text.strip()))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(f"{text!r:.60} is no value") from error


def returns(value: Any, expected: Any) -> bool:
    """Whether a returned value is the expected one, or the one that an expected text writes."""
    if _agree(value, expected):
        return True
    if not isinstance(expected, str) or (isinstance(value, str) and expected[:1] not in "\"'"):
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
    return words == wanted or (len(words) == len(wanted) and all(map(_word_agrees, words, wanted)))


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
    has_decimals = len(expected.partition(".")[2]) >= 6 and "e" not in expected.lower()
    return abs(value - wanted) <= max(abs(wanted) * RELATIVE, ABSOLUTE if has_decimals else 0)
