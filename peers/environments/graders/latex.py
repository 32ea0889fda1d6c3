r"""The last `\boxed{…}` of a text, and bounds on what it may contain.

Both take time in proportion to the text. An answer beyond a bound earns nothing, whatever machine
looks at it; what is within the bounds costs a symbolic library seconds at most.
"""

from __future__ import annotations

import re

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
