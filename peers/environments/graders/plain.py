"""Graders that need no library: equal texts, and equal numbers."""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from peers.environments.graders import Grader, NoOptions, zero
from peers.environments.graders.answers import ALIKE
from peers.environments.graders.code_forms import loads
from peers.environments.graders.code_tests import returns
from peers.environments.interface import Grade, NotGradable

DIGITS_MAX = 100
"""Longest number that is read; the time to compare two grows with their length."""
NUMBER = re.compile(
    r"[+-]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?(?:[eE][+-]?\d{1,3}(?![\w.])|/\d+)?", re.ASCII
)
POWER = re.compile(
    r"(?:(?:\\times|\\cdot|\*)\s*)?10\s*(?:\^|\*\*)\s*(?:\{\s*)?(?=[-+]?\d{1,3}\W*$)", re.ASCII
)
"""The power of ten of 6 \\times 10^5, which is read as 6e5, at the end of a text. No two repeated
parts can take the same white space: the time would grow with its cube."""
FIELD = "output"
"""Where `code_output_prediction` has its answer."""
JSON_CHARACTERS_MAX, OBJECTS_MAX = 1 << 16, 256
"""The end of a text that is searched for JSON, and beginnings of objects that are tried there."""
LAST_CHARACTERS = 4096
"""The end of a text that is searched for its last number."""


class ExactOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How texts are compared."""

    ignore_case: bool = False


class Exact(Grader):
    """Rewards the answer, character by character but for white space at both ends."""

    name = "exact"
    Options = ExactOptions
    options: ExactOptions

    def grade(self, text: str, answer: str, data: Mapping[str, Any]) -> Grade:
        return Grade(float(self._plain(text) == self._plain(answer)))

    def _plain(self, text: str) -> str:
        return text.strip().casefold() if self.options.ignore_case else text.strip()


class NumberOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How numbers are compared."""

    tolerance: Annotated[float, Meta(ge=0)] = 0.0
    """Largest absolute difference from the answer."""


class Number(Grader):
    """Rewards a text whose last number equals the answer: whole, decimal, or a fraction a/b."""

    name = "number"
    Options = NumberOptions
    options: NumberOptions

    def check(self, answer: str, data: Mapping[str, Any]) -> None:
        if number_in(answer) is None:
            raise NotGradable(
                f"the answer {answer[:40]!r} holds no number of at most {DIGITS_MAX} digits; "
                "repair the data, or choose the grader 'exact'"
            )

    def grade(self, text: str, answer: str, data: Mapping[str, Any]) -> Grade:
        self.check(answer, data)
        expected, found = number_in(answer), number_in(text)
        if found is None or expected is None:
            return zero("no number")
        return Grade(float(abs(found - expected) <= Fraction(self.options.tolerance)))


class Json(Grader):
    """Rewards a text whose last JSON object is the answer, or has it under `output`."""

    name = "json"
    Options = NoOptions
    takes_lists = True

    def grade(self, text: str, answer: str, data: Mapping[str, Any]) -> Grade:
        given, expected = last_object(text), answer
        if given is None:
            return zero("no JSON")
        with suppress(ValueError, RecursionError):
            read = loads(answer)
            expected = read.get(FIELD, read) if isinstance(read, dict) else answer
        return Grade(float(any(returns(each, expected) for each in (given, given.get(FIELD)))))

    def completion(self, answer: str) -> str:
        return answer if answer[:1] == "{" else json.dumps({FIELD: answer})


def last_object(text: str) -> dict[str, Any] | None:
    """The last JSON object of a text that is in no other; None without one."""
    end, found, start = text[-JSON_CHARACTERS_MAX:], None, 0
    for _ in range(OBJECTS_MAX):
        if (start := end.find("{", start)) < 0:
            break
        try:
            found, start = json.JSONDecoder().raw_decode(end, start)
        except (ValueError, RecursionError):
            start += 1
    return found


def _with_exponent(end: str) -> str:
    """The end of a text with `6e5` for 6 \\times 10^5 as its last number."""
    if (power := POWER.search(end)) is None:
        return end
    before, exponent = end[: power.start()].rstrip(), end[power.end() :]
    is_factor = before[-1:].isdigit() and power[0][0] in "\\*"
    return f"{before}e{exponent}" if is_factor else f"{before} 1e{exponent}"


def number_in(text: str) -> Fraction | None:
    """The last number of a text, exactly; None if it has none, or one that is too long or only part
    of a longer word of digits, such as `12²` or `1.1.1`."""
    end = _with_exponent(text.translate(ALIKE)[-LAST_CHARACTERS:])
    found = [match for match in NUMBER.finditer(end) if re.search(r"\d", match[0])]
    if not found or len(found[-1][0]) > DIGITS_MAX:
        return None
    word, before = found[-1][0], end[: found[-1].start()][-1:]
    if end[: found[-1].start()].rstrip("{ ").endswith(("^", "**")):
        return None  # an exponent
    if end[found[-1].end() :][:1].isnumeric() or (before.isnumeric() and word[0] not in "+-"):
        return None
    numerator, _, denominator = word.replace(",", "").partition("/")
    try:
        return Fraction(Decimal(numerator)) / Fraction(denominator or "1")
    except (ArithmeticError, ValueError):  # division by zero; "/5" without a numerator
        return None
