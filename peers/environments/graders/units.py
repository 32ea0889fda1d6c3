r"""Units at the end of an answer, such as `5\text{ cm}^2`, which math-verify leaves out.

Only common units are known; another word at the end says nothing about the answer.
"""

from __future__ import annotations

import re

_NAMES = """
mm millimeter millimetre, cm centimeter centimetre, m meter metre, km kilometer kilometre,
inch inches, ft foot feet, yd yard, mi mile, mg milligram, g gram, kg kilogram, lb pound, oz ounce,
ton tonne, ms millisecond, s sec second, min minute, h hr hour, day, week, month, year,
ml milliliter millilitre, l liter litre, gallon, dollar, cent, euro, degree, radian rad, percent
"""
_UNITS = {word: names[0] for names in map(str.split, _NAMES.split(",")) for word in names}

_END = re.compile(
    r"(?:[\s~{]|\\[,;:! ]|\\(?:text|textrm|mathrm|mbox|rm)(?![A-Za-z]))*"
    r"(?<![A-Za-z\\])(?P<word>[A-Za-z]+)[\s}.]*(?:\^\s*\{?(?P<power>[23])\}?)?[\s}.]*$"
)
_COMMAND = re.compile(r"\\[A-Za-z]+")
_LETTER = re.compile(r"[A-Za-z]")


def unit_of(answer: str) -> tuple[str, str] | None:
    """The unit of a number and its power; None without a known one."""
    end = _END.search(answer)
    if end is None or _LETTER.search(_COMMAND.sub("", answer[: end.start()])):
        return None  # a symbolic answer
    word = end["word"] if len(end["word"]) < 3 else end["word"].lower()
    unit = _UNITS.get(word) or _UNITS.get(word.removesuffix("s"))
    return (unit, end["power"] or "1") if unit is not None else None


def units_differ(one: str, other: str) -> bool:
    """Whether both answers have a known unit, and not the same."""
    units = unit_of(one), unit_of(other)
    return None not in units and units[0] != units[1]
