"""The grader `math`: the last `\boxed{…}` of a text, compared with the answer by math-verify.

What may cost time is bounded by what the answer looks like, so that every validator decides alike.
A clock decides nothing: an answer that takes `CPU_SECONDS` all the same is not gradable."""

import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Literal

import msgspec

from peers.environments.graders import Grader, NoOptions, valid, zero
from peers.environments.graders.answers import plain
from peers.environments.graders.pool import ProcessFailed, ServiceError, pool_of
from peers.environments.interface import Grade, NotGradable
from swarm.errors import UserError

# The last `\boxed{…}` of a text, and bounds on what it may contain.
#
# Both take time in proportion to the text. An answer beyond a bound earns nothing, whatever machine
# looks at it; what is within the bounds costs a symbolic library seconds at most.

ANSWER_CHARACTERS_MAX = 400
"""Longest answer in a box; 99.9 % of the answers of public data sets have fewer than 150."""
DEPTH_MAX = 12
"""Nested brackets."""
DIGITS_MAX = 60
"""Digits of one number."""
OPERATORS_MAX = 60
"""Operators and commands; the time of a simplification grows steeply with them."""
POWERS_MAX = 16
COMPUTED_DIGITS_MAX = 4
"""Digits of one number in an answer with a function that math-verify computes as it reads it."""

NO_ANSWER = re.compile(
    r"(?:see (?:the )?)?proof\b.*|not ?found|n/a|null|nan|(?:to )?prove\b.*|", re.I | re.DOTALL
)
"""What data sets, such as NuminaMath, have as the answer of a task that has none."""
BOX = re.compile(r"\\f?boxed\s*\{")
_NUMBER = re.compile(r"\d[\d,. ]*", re.ASCII)
_OPERATOR = re.compile(r"\\[A-Za-z]+|[-+*/^_=<>!,;|&]")
_POWER = re.compile(r"\^|\\(?:binom|choose|tbinom|dbinom)|!")
_BINOMIAL = re.compile(r"binom|choose")
_COMPUTED = re.compile(r"binom|choose|gcd|lcm|det|vmatrix")
_MATRICES = re.compile(r"operatorname[\s*{]*(?:zeros|ones|diag|[hv]stack|orth)")
"""Functions that make matrices of any size."""
_OPENING, _CLOSING = "([{", ")]}"


def boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{…}`; None without one, or if it is not closed."""
    last = None
    for last in BOX.finditer(text):  # noqa: B007
        pass
    if last is None:
        return None
    depth = 1
    # One character more than allowed, so that `too_complex` sees that it is too long.
    for index in range(last.end(), min(len(text), last.end() + ANSWER_CHARACTERS_MAX + 2)):
        if text[index] in "{}" and text[index - 1] != "\\":
            depth += 1 if text[index] == "{" else -1
            if depth == 0:
                return text[last.end() : index].strip() or None
    rest = text[last.end() : last.end() + ANSWER_CHARACTERS_MAX + 1]
    return rest if len(rest) > ANSWER_CHARACTERS_MAX else None


def too_complex(answer: str) -> bool:
    """Whether an answer is beyond a bound on its length, depth, numbers or operators."""
    if len(answer) > ANSWER_CHARACTERS_MAX:
        return True
    numbers = [sum(c.isdigit() for c in found[0]) for found in _NUMBER.finditer(answer)]
    digits_max = DIGITS_MAX
    if _COMPUTED.search(answer):
        if len(_POWER.findall(answer)) > len(_BINOMIAL.findall(answer)):
            return True
        digits_max = COMPUTED_DIGITS_MAX
    return (
        _MATRICES.search(answer) is not None
        or max(numbers, default=0) > digits_max
        or len(_OPERATOR.findall(answer)) > OPERATORS_MAX
        or len(_POWER.findall(answer)) > POWERS_MAX
        or _depth(answer) > DEPTH_MAX
    )


def _depth(answer: str) -> int:
    depth = deepest = 0
    for character in answer:
        if character in _OPENING:
            depth += 1
            deepest = max(deepest, depth)
        elif character in _CLOSING:
            depth -= 1
    return deepest


# Units at the end of an answer, such as `5\text{ cm}^2`, which math-verify leaves out.
#
# Only common units are known; another word at the end says nothing about the answer.

_NAMES = """
mm millimeter millimetre, cm centimeter centimetre, m meter metre, km kilometer kilometre,
inch inches, ft foot feet, yd yard, mi mile, mg milligram, g gram, kg kilogram, lb pound, oz ounce,
ton tonne, ms millisecond, s sec second, min minute, h hr hour, day, week, month, year,
ml milliliter millilitre, l liter litre, gallon, dollar, cent, euro, degree, radian rad, percent
"""
_UNITS = {word: names[0] for names in map(str.split, _NAMES.split(",")) for word in names}

_STYLE = r"\\(?:text|textrm|mathrm|mbox|rm)(?![A-Za-z])"
_POWER_OF_UNIT = r"[\s}.]*(?:\^\s*\{?(-?[1-9])\}?)?"
_END = re.compile(
    rf"(?P<space>(?:[\s~{{]|\\[,;:! ]|{_STYLE})*)(?<![A-Za-z\\])([A-Za-z]+){_POWER_OF_UNIT}"
    rf"(?:[\s}}]*/(?:[\s{{]|{_STYLE})*([A-Za-z]+){_POWER_OF_UNIT})?[\s}}.]*$"
)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_LETTER = re.compile(r"[A-Za-z]")
_DOLLARS = re.compile(r"\s*\\?\$(?=\s*\d)(?!.*\$\s*$)")


def unit_of(answer: str) -> tuple[str, tuple[str, ...]]:
    """A number without its unit, and the unit with its powers; empty without a known one."""
    if dollars := _DOLLARS.match(answer):
        return answer[dollars.end() :], ("dollar", "1", "")
    end = _END.search(answer)
    if end is None or _LETTER.search(_COMMAND.sub("", answer[: end.start()])):
        return answer, ()  # a symbolic answer
    word, power, per, its_power = end.groups(default="")[1:]
    words = [each if len(each) < 3 else each.lower() for each in (word, per) if each]
    units = [_UNITS.get(each) or _UNITS.get(each.removesuffix("s"), "") for each in words]
    if "" in units or not re.search(r"\d", answer[: end.start()]):
        return answer, ()
    rest = answer[: end.start()] if end["space"] or len(word) > 1 else answer
    return rest, (units[0], power or "1", *units[1:], its_power)


CPU_SECONDS = 2.0
"""CPU time of math-verify for one answer. Nearly all take milliseconds."""
SERVICE = "peers.environments.graders.math_service:MathService"


class MathReply(msgspec.Struct, frozen=True):
    """What the process found out."""

    outcome: Literal[
        "equal", "different", "unreadable", "too complex", "unevaluated", "incomparable", "bad gold"
    ]


class Math(Grader):
    """Rewards a boxed answer that equals the task's, numerically or symbolically."""

    name = "math"
    Options = NoOptions

    def grade(self, text: str, answer: str, data: Mapping[str, Any]) -> Grade:
        if (given := boxed(valid(text))) is None:
            return zero("no boxed answer")
        if too_complex(given):
            return zero("too complex")
        expected, unit = unit_of(boxed(answer) or answer)
        given, own_unit = unit_of(given)
        if find_spec("math_verify") is None:
            raise UserError(
                "the grader 'math' needs math-verify, which is not installed here; type: "
                "pip install 'swarm-rl[math]'"
            )
        pool = pool_of(SERVICE, CPU_SECONDS)
        try:
            reply = msgspec.convert(pool.ask({"gold_text": expected, "text": given}), MathReply)
        except (ProcessFailed, ServiceError) as error:
            raise NotGradable(f"math-verify cannot judge {given[:80]!r}: {error}") from error
        if reply.outcome == "bad gold":
            raise NotGradable(
                f"the task's own answer {answer[:80]!r} is beyond the grader's bounds, or does not "
                "equal itself for math-verify; repair the data, or choose another grader"
            )
        if reply.outcome == "equal" and unit and own_unit and unit != own_unit:
            return zero("another unit")
        if reply.outcome in ("equal", "different"):
            return Grade(float(reply.outcome == "equal"))
        return zero(reply.outcome)

    def check(self, answer: str, data: Mapping[str, Any]) -> None:
        gold = boxed(answer) or answer.strip()
        if len(gold) > ANSWER_CHARACTERS_MAX or NO_ANSWER.fullmatch(plain(gold)):
            raise NotGradable(
                f"the answer {gold[:40]!r} is a proof or none, which the grader 'math' cannot "
                "compare; leave such rows out"
            )

    def completion(self, answer: str) -> str:
        return answer if not answer or boxed(answer) is not None else f"\\boxed{{{answer}}}"
