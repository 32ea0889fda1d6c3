"""Numbers compared exactly, where math-verify compares floats to six decimals.

Powers too large to compute are compared by their residues modulo a prime. `too_large` has bounded
the other expressions that come here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import sympy

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
        exponent = rational(node.exp) if node.exp.is_number and _is_small(node.exp) else None
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
    total = values[0]
    for value in values[1:]:
        total = total + value if node.is_Add else total * value
    return total


def is_computable(node: Any) -> bool:
    """Whether a node is a factorial or binomial of small whole numbers."""
    return isinstance(node, sympy.factorial | sympy.binomial) and all(
        each.is_Integer and 0 <= each <= FACTORIAL_MAX for each in node.args
    )


def _is_small(exponent: Any) -> bool:
    """Whether an exponent is a number, perhaps negative, or a small sum or product of numbers."""
    return not exponent.has(sympy.Pow)
