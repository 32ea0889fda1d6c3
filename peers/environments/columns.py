"""Values of a row by name, and conditions on them.

A name is a column's, or that of a value inside one: `reward_model.ground_truth`,
`messages.0.content`. Text on the way is read as JSON, because many data sets keep tables as text.
`length(NAME)` is the number of characters of a text, `script(NAME)` the writing system of most of
its letters, as Unicode names it, `language(NAME)` its ISO 639-1 code, or nothing where no language
is likely (by lingua, which the extra `languages` installs, from the first 2,000 characters); of
messages, all three are those of all contents."""

import functools
import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from swarm.terminal.extras import require_extra

Row = dict[str, Any]
"""A row by column; JSON values only."""

FUNCTION = re.compile(r"(length|script|language)\((.+)\)")


def column_of(name: str, columns: Collection[str]) -> tuple[str, Sequence[str]] | None:
    """The column that a name begins with, and the way inside it; None if there is none."""
    if found := FUNCTION.fullmatch(name):
        return column_of(found[2], columns)
    parts = name.split(".")
    for end in range(len(parts), 0, -1):  # a column's own name may have dots
        column = ".".join(parts[:end])
        if column in columns:
            return column, parts[end:]
    return None


def value_of(row: Row, name: str) -> Any:
    """The value of a name; raises `ValueError` if the row lacks it."""
    if of_text := FUNCTION.fullmatch(name):
        of = {"length": len, "script": _script, "language": _language}[of_text[1]]
        try:
            return of(_text(value_of(row, of_text[2])))
        except RecursionError as error:
            raise ValueError(f"{name:.60} is nested too deeply") from error
    if (found := column_of(name, row)) is None:
        raise ValueError(f"it lacks {name!r}; it has: {listed(name, row)}")
    at, inner = found
    value = row[at]
    for part in inner:
        if isinstance(value, str):
            value = read_json(value, at)
        if isinstance(value, list):
            value = {str(place): value[place] for place in range(-len(value), len(value))}
        if not isinstance(value, dict) or part not in value:
            has = listed(part, value) if isinstance(value, dict) else f"{value!r:.60}"
            raise ValueError(f"it lacks {name!r}; {at} has: {has}")
        at, value = f"{at}.{part}", value[part]
    return value


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(map(_text, value))
    if isinstance(value, dict):  # a message, or a part of one
        return _text(value.get("content", value.get("text")))
    return str(value or "")


def _script(text: str) -> str:
    names = Counter(unicodedata.name(each, "?").split()[0] for each in text if each.isalpha())
    return names.most_common(1)[0][0].lower() if names else ""


def _language(text: str) -> str:
    # Its start tells the language; a megabyte without a space would take minutes.
    found = _detector().detect_language_of(text[:2000])
    return "" if found is None else str(found.iso_code_639_1.name).lower()


@functools.cache
def _detector() -> Any:
    require_extra("languages", "a condition on language(…)")
    from lingua import LanguageDetectorBuilder

    return LanguageDetectorBuilder.from_all_languages().build()


def read_json(text: str | bytes, what: str) -> Any:
    """Parse JSON from a data set; raises `ValueError`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is no JSON: {error}") from error


def listed(wanted: str, names: Iterable[str]) -> str:
    """The names that there are, for a message, and which is nearest to the one that is wanted."""
    nearest = [f" (did you mean {each!r}?)" for each in get_close_matches(wanted, names, 1)]
    return f"{', '.join(names):.1000}{''.join(nearest)}"


def flat(conditions: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Conditions by full name: `{extra_info = {split = "train"}}` is one on `extra_info.split`."""
    found: dict[str, Any] = {}
    for name, wanted in conditions.items():
        is_table = isinstance(wanted, dict)
        found |= flat(wanted, f"{before}{name}.") if is_table else {before + name: wanted}
    return found


def matches(value: Any, wanted: Any) -> bool:
    """Whether a value meets a condition.

    The condition is a value; `LOW:HIGH` for numbers, either of which may be left out; `*` for
    anything but null; `!` before any of these for what does not meet it; or a list: one must be
    met, and all with `!`. Text also means a number, true, false or null that is written like it."""
    if isinstance(wanted, list):
        excluded = [each for each in wanted if isinstance(each, str) and each.startswith("!")]
        others = [each for each in wanted if each not in excluded]
        is_one = not others or any(matches(value, each) for each in others)
        return is_one and all(matches(value, each) for each in excluded)
    if not isinstance(wanted, str):
        return bool(value == wanted) and isinstance(value, bool) == isinstance(wanted, bool)
    if wanted.startswith("!"):
        return not matches(value, wanted[1:])
    if wanted == "*":
        return value is not None
    return wanted == (value if isinstance(value, str) else json.dumps(value)) or (
        not isinstance(value, bool) and _is_between(value, wanted)
    )


def _is_between(value: Any, bounds: str) -> bool:
    low, colon, high = bounds.partition(":")
    try:
        return colon != "" and float(low or -math.inf) <= float(value) <= float(high or math.inf)
    except (TypeError, ValueError, OverflowError):
        return False
