"""The process behind the grader `math`: math-verify 0.9.0, without its own timeouts.

Its timeouts use signals, which work in a main thread only; the owner kills this process instead."""

import logging
import math
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache, reduce
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, parse, verify
from sympy.core.function import AppliedUndef
from sympy.core.relational import Relational

from peers.environments.graders.answers import by_text, readable

# Numbers compared exactly, where math-verify compares floats to six decimals.
#
# Powers too large to compute are compared by their residues modulo a prime. `too_large` has
# bounded the other expressions that come here.

APART = Fraction(2, 10**6)
"""Relative distance of a decimal from the number that it rounds to six digits."""
ZERO = 1e-12
"""What remains of a difference that is zero after its evaluation to `DIGITS` digits."""
DIGITS = 30
PERCENT = sympy.UnevaluatedExpr(sympy.Rational(1, 100))
EXPONENT_MAX = 10**6
FACTORIAL_MAX = 10**4
PRIME = (1 << 1300) + 135
"""A prime with more digits than an answer can write as numbers, so that nobody writes a residue."""


def contradicts(gold: Any, found: Any) -> bool:
    """Whether two expressions that math-verify finds equal are different numbers after all."""
    if isinstance(gold, sympy.Eq) and isinstance(found, sympy.Eq):
        return contradicts(gold.rhs, found.rhs)
    if isinstance(gold, sympy.Eq) or isinstance(found, sympy.Eq):
        gold, found = (e.rhs if isinstance(e, sympy.Eq) else e for e in (gold, found))
    if _are(sympy.Tuple, gold, found) or _are(sympy.Interval, gold, found):
        return len(gold.args) == len(found.args) and any(map(contradicts, gold.args, found.args))
    if _are(sympy.FiniteSet, gold, found):
        return not (_covers(gold.args, found.args) and _covers(found.args, gold.args))
    if not _are(sympy.Expr, gold, found) or gold.free_symbols or found.free_symbols:
        return False
    # As math-verify has it, the sign of percent may be left out.
    return not any(
        _same_number(one, other)
        for one in {gold, gold.xreplace({PERCENT: sympy.Integer(1)})}
        for other in {found, found.xreplace({PERCENT: sympy.Integer(1)})}
    )


def _are(kind: Any, *expressions: Any) -> bool:
    return all(isinstance(each, kind) for each in expressions)


def _covers(some: Any, others: Any) -> bool:
    return all(any(not contradicts(one, other) for other in others) for one in some)


def _same_number(gold: Any, found: Any) -> bool:
    if gold == found:
        return True  # infinite ones, too
    one, other = rational(gold), rational(found)
    if one is not None and other is not None:
        if one == other:
            return True
        if not (gold.has(sympy.Float) or found.has(sympy.Float)):
            return False
        return abs(one - other) <= APART * abs(one)
    try:
        here, there = complex(sympy.N(gold, DIGITS)), complex(sympy.N(found, DIGITS))
        least = ZERO if not here or not there else 0.0
        return abs(here - there) <= max(float(APART) * abs(here), least)
    except (TypeError, ValueError, ArithmeticError):
        return True  # no number, or infinite: math-verify's word counts


def rational(expression: Any) -> Fraction | None:
    """The value of sums, products and powers of rational numbers; None for anything else."""
    found: Fraction | None = _value(expression, Fraction, lambda base, power: base**power)
    return found


def residue(expression: Any) -> int | None:
    """The same modulo `PRIME`; None too where a power's exponent is beyond `EXPONENT_MAX`."""

    def ring(given: Any) -> int:
        number = Fraction(given)
        inverse: int = pow(number.denominator, -1, PRIME)
        return number.numerator * inverse % PRIME

    found: int | None = _value(expression, ring, lambda base, power: pow(base, power, PRIME))
    return None if found is None else found % PRIME


def _value(node: Any, ring: Callable[[Any], Any], power: Callable[[Any, int], Any]) -> Any:
    if node.is_Float:
        return ring(str(node))
    if node.is_Rational:
        return ring(Fraction(int(node.p), int(node.q)))
    if isinstance(node, sympy.UnevaluatedExpr):
        return _value(node.args[0], ring, power)
    if isinstance(node, sympy.Pow):
        # A number, perhaps negative, or a small sum or product of numbers.
        is_small = node.exp.is_number and not node.exp.has(sympy.Pow)
        exponent = rational(node.exp) if is_small else None
        base = _value(node.base, ring, power)
        if base is None or exponent is None or exponent.denominator != 1:
            return None
        if abs(exponent) > EXPONENT_MAX or (exponent < 0 and not base):
            return None
        return power(base, int(exponent))
    if is_computable(node):
        of = math.factorial if isinstance(node, sympy.factorial) else math.comb
        return ring(of(*map(int, node.args)))
    if not (node.is_Add or node.is_Mul):
        return None
    values = [_value(each, ring, power) for each in node.args]
    if None in values:
        return None
    return reduce(operator.add if node.is_Add else operator.mul, values)


def is_computable(node: Any) -> bool:
    """Whether a node is a factorial or binomial of small whole numbers."""
    return isinstance(node, sympy.factorial | sympy.binomial) and all(
        each.is_Integer and 0 <= each <= FACTORIAL_MAX for each in node.args
    )


NODES_MAX = 120
"""Nodes of an expression's tree."""
POWER_DIGITS_MAX = 2000
"""Digits of a power or factorial of numbers, as estimated before it is computed."""
TERMS_MAX = 40
"""Terms of a power of a sum that is expanded: its exponent times the sum's terms."""

UNEVALUATED = (sympy.Integral, sympy.Sum, sympy.Product, sympy.Limit, sympy.Derivative)
"""Nobody knows how long these take to compute, and an answer that holds one is none."""

_DOTS = re.compile(r"\\[lcv]?dots|\.\.\.|…")
_SPACED = re.compile(r"(?<=\d)(?:\\[,!;: ]|\{,\}|~)(?=\d{3})", re.ASCII)
"""White space within a number, which math-verify would take for a product."""
_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0),)


class MathService:
    """Compares `text` with `gold`; both are contents of a box."""

    def __init__(self) -> None:
        logging.disable(logging.CRITICAL)
        _compare(sympy.Integer(1), sympy.Float(0.5))  # loads what is imported lazily

    def __call__(self, request: dict[str, Any]) -> dict[str, str]:
        return {"outcome": self._outcome(**request)}

    def _outcome(self, gold_text: str, text: str) -> str:
        gold_text, text = readable(gold_text), readable(text)
        if (told := by_text(gold_text, text)) is not None:
            return "equal" if told else "different"
        if (gold := _gold(gold_text)) is None:
            return "bad gold"
        if (found := _read(text)) is None:
            return "unreadable"
        if too_large(gold) or too_large(found):
            return _outcome_of_large(gold, found)
        if found.has(*UNEVALUATED):
            return "equal" if found == gold else "unevaluated"
        # Else `17+25` would earn the reward of 42, and a model learn to repeat the question.
        if _is_number(gold) and not _is_number(found) and not _are_curves(gold, found):
            return "unevaluated"
        try:
            equal = _are_equal(gold, found) and all(
                _is_name(left) or _are_equal(gold, left) for left in _lefts(gold, found)
            )
            return "equal" if equal else "different"
        except (MemoryError, KeyboardInterrupt):
            raise
        except Exception:  # sympy cannot compare the two
            return "incomparable"


def _is_number(expression: Any) -> bool:
    """Whether an expression is a number, or an equation for one, with nothing left to compute."""
    if isinstance(expression, sympy.Eq):
        return _is_number(expression.rhs)
    if not isinstance(expression, sympy.Expr):
        return False
    if isinstance(expression, sympy.Mul):
        factors = [factor for factor in expression.args if factor not in (-1, PERCENT)]
        # At most one more than the power of ten of 6 \times 10^5.
        numbers = [factor for factor in factors if not _is_power_of_ten(factor)]
        return len(numbers) <= 1 and len(factors) <= 2 and all(map(_is_number, numbers))
    return bool(expression.is_Number) or _is_power_of_ten(expression)


def _are_curves(gold: Any, found: Any) -> bool:
    """Whether both are equations, the gold's one like 2x - y + 1 = 0, which is no value."""
    return _are(sympy.Eq, gold, found) and gold.rhs == 0 and not gold.lhs.is_Symbol


def _lefts(gold: Any, found: Any) -> list[Any]:
    """The left sides of an answer's equations, of which math-verify compares the last right side
    with a gold that is none."""
    if isinstance(gold, Relational | sympy.And):
        return []
    parts = found.args if isinstance(found, sympy.And) else [found]
    return [part.lhs for part in parts if isinstance(part, sympy.Eq)]


def _is_name(left: Any) -> bool:
    """Whether a side of an equation may be what the task asks for: no number, and no polynomial of
    one symbol, such as 2x, whose equation is not solved."""
    if left.atoms(AppliedUndef):
        return True
    symbols = left.free_symbols
    if len(symbols) != 1:
        return bool(symbols)
    return left in symbols or not left.is_polynomial()


def _is_power_of_ten(expression: Any) -> bool:
    if isinstance(expression, sympy.Pow) and expression.exp == -1:
        expression = expression.base  # of 1.6 \times 10^{-19}
    if not isinstance(expression, sympy.Pow) or expression.base != 10:
        return False
    exponent = expression.exp
    return bool(exponent.is_Integer) or (exponent.is_Mul and _is_number(exponent))


def _outcome_of_large(gold: Any, found: Any) -> str:
    """The verdict on numbers of which one has a power that is too large to compute."""
    if not isinstance(gold, sympy.Expr) or not isinstance(found, sympy.Expr):
        return "different" if too_large(gold) else "too complex"
    if gold == found:
        return "equal"
    one, other = residue(gold), residue(found)
    if one is not None and other is not None:
        return "equal" if one == other else "different"
    return "too complex" if too_large(found) else "different"


def _is_comparable(gold: Any) -> bool:
    """Whether a gold with large powers can be compared all the same: all have small exponents."""
    powers = gold.atoms(sympy.Pow, sympy.exp)
    small = all(p.exp.is_Integer and abs(p.exp) <= EXPONENT_MAX for p in powers)
    nodes = sympy.preorder_traversal(gold)
    return small and all(is_computable(node) for node in nodes if _is_factorial(node))


@lru_cache(1024)
def _gold(text: str) -> Any:
    """The expression of a task's answer; None if math-verify does not find it equal to itself."""
    if (expression := _read(text)) is None:
        return None
    if not expression.has(*UNEVALUATED) and too_large(expression):
        return expression if _is_comparable(expression) else None
    return expression if _compare(expression, expression) else None


def _read(text: str) -> Any:
    if _DOTS.search(text):  # math-verify would leave them out
        return None
    text = _SPACED.sub("", text)
    found = parse(
        f"\\boxed{{{text}}}", _EXTRACTION, fallback_mode="no_fallback", parsing_timeout=None
    )
    return found[0] if found else None


def _compare(gold: Any, found: Any) -> bool:
    return bool(verify([gold], [found], timeout_seconds=None, raise_on_error=True))


def _are_equal(gold: Any, found: Any) -> bool:
    if isinstance(gold, sympy.Interval | sympy.Union) and isinstance(found, Relational | sympy.And):
        gold, found = found, gold  # an inequality is compared with intervals only as a gold
    return _compare(gold, found) and not contradicts(gold, found)


def too_large(expression: Any) -> bool:
    """Whether an expression is beyond the bounds of this module; it is not evaluated here."""
    nodes = enumerate(sympy.preorder_traversal(expression))
    return any(index >= NODES_MAX or _is_large(node) for index, node in nodes)


def _is_large(node: Any) -> bool:
    if isinstance(node, sympy.Pow | sympy.exp):
        base, exponent = node.as_base_exp()
        power = _magnitude(exponent)
        if base.is_Add and power * len(base.args) > TERMS_MAX:
            return True
        return power * _digits(base) > POWER_DIGITS_MAX
    if _is_factorial(node):
        return max(map(_magnitude, node.args)) > POWER_DIGITS_MAX / 3
    return False


def _is_factorial(node: Any) -> bool:
    kinds = (sympy.factorial, sympy.factorial2, sympy.subfactorial, sympy.binomial)
    return isinstance(node, kinds)


def _magnitude(node: Any) -> float:
    """An upper bound on the absolute value of a numeric expression; 1 for symbols."""
    try:
        return _bound(node)
    except OverflowError:
        return math.inf


def _bound(node: Any) -> float:
    if node.is_Rational or node.is_Float:
        return abs(float(node))
    if isinstance(node, sympy.Pow | sympy.exp):
        base, exponent = node.as_base_exp()
        power: float = max(1.0, _bound(base)) ** _bound(exponent)
        return power
    if node.is_Mul:
        return math.prod(map(_bound, node.args))
    if node.is_Add:
        return sum(map(_bound, node.args))
    if isinstance(node, sympy.factorial):
        return math.gamma(min(_bound(node.args[0]), 1e3) + 1)
    return max([4.0, *map(_bound, node.args)]) if node.args else 4.0


def _digits(node: Any) -> float:
    """Digits of a numeric expression, at least 1."""
    return max(1.0, math.log10(max(1.0, _magnitude(node))))
