r"""What the text of an answer alone tells: how it is read, and what math-verify would get wrong.

Texts here have at most `ANSWER_CHARACTERS_MAX` characters."""

import re

ALIKE = {
    **{code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)},
    **dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2212\ufe63"), "-"),
    **dict.fromkeys(map(ord, "\u00a0\u2007\u2009\u202f\u3000"), " "),
    ord("×"): "\\times ",
    ord("·"): "\\cdot ",
    ord("⋅"): "\\cdot ",
}
"""Characters that models write for those of ASCII: full width, hyphens and minus signs, spaces."""

_REWRITTEN = [
    (re.compile(pattern), better)
    for pattern, better in (
        (r"\\varnothing(?![A-Za-z])", r"\\emptyset"),
        (r"\\mathbb\s*([A-Z])", r"\\mathbb{\1}"),
        (r"\\[dt]?binom\s*(\d)\s*(\d)", r"\\binom{\1}{\2}"),
        (r"\*\*\s*(-?\w+)", r"^{\1}"),
        (r"(?<![\\A-Za-z{])(ln|log|sin|cos|tan|pi)(?![A-Za-z])", r"\\\1 "),
    )
]
"""What math-verify does not read, and the same as it does."""
_MIXED = re.compile(
    r"(-?)(\d+)(?:\s*\\[dt]?frac\s*\{?(\d+?)\}?\s*\{?(\d+)\}?|\s+(\d+)/(\d+))(\s*\\?%)?", re.ASCII
)
_REPEATING = re.compile(r"(-?)(\d*)\.(\d*)\\overline\s*\{?(\d+)\}?", re.ASCII)
_STYLES = r"\\(?:text(?:bf|it|rm)?|math(?:bf|rm|sf|it)|boldsymbol|bm|mbox)(?![A-Za-z])\s*"
_STYLED_NUMBER = re.compile(_STYLES + r"\{([-+\d.,/:^%$\s]*\d[-+\d.,/:^%$\s]*)\}", re.ASCII)
_STYLED = re.compile(_STYLES + r"\{")
_LEAD = re.compile(
    r"(?:(?:so|thus|hence|therefore),?\s+)?(?:(?:the|my|our)\s+)?(?:(?:final|correct)\s+)?"
    r"(?:answer|result|solution|value|total)\s*(?:is|are|equals|=|:)+\s*:?\s*",
    re.IGNORECASE,
)
_STYLED_LEAD = re.compile(_STYLES + r"\{([^{}]*)\}")
_BASED = re.compile(r"([\dA-Fa-f]*\d[\dA-Fa-f]*)\s*_\s*\{?\s*(\d{1,2})\s*\}?", re.ASCII)
_WORDS = re.compile(r"[A-Za-z]{2,}(?:[\s'-]+[A-Za-z]{2,})*")
_CHOICE = re.compile(
    r"(?:[Oo]ption|[Cc]hoice)?\s*(?:\(([A-J])\).*|([A-J])(?:\s*[).:].*)?)", re.DOTALL
)
"""The letter of a choice, perhaps with what stands behind it."""
_CHOICES = re.compile(r"[A-J](?:\s*,\s*[A-J])+")
_CLOCK = re.compile(
    r"0?(\d{1,2})\s*:\s*([0-5]\d)(?:\s*:\s*([0-5]\d))?\s*([ap])?\.?\s*(?:m\.?)?", re.I | re.ASCII
)
_CHANGING = re.compile(
    r"(?<![A-Za-z])(?:no|not|nor|never|neither|cannot|isn'?t|wrong|incorrect|false|but|except|"
    r"unless|dozen|hundred|thousand|million|billion|trillion)(?![A-Za-z])"
    r"|(?<![A-Za-z])and\s+an?\s+[a-z]+|\{[\s\\~]*(?:squared|cubed|factorial)(?![A-Za-z])",
    re.IGNORECASE,
)
"""Words beside a value, which math-verify leaves out, that deny it or make another one of it."""
_EXPONENT = re.compile(r"([-+]?\d+(?:\.\d+)?)[eE]\+?(-?\d{1,4})", re.ASCII)
_THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?", re.ASCII)
_LIST = re.compile(r"[-+]?\d+(?:\s*,\s*[-+]?\d+)+", re.ASCII)


def readable(text: str) -> str:
    r"""An answer as math-verify reads it best: without styles, lead-in, braces and a full stop."""
    text = text.translate(ALIKE).strip()
    before = None
    while before != text:
        before = text
        text = _STYLED_NUMBER.sub(r"{\1}" if text.count("\\") > 1 else r"\1", text)
        text = _without_lead(_unwrapped(text)).strip()
        if text.endswith(".") and not text.endswith(".."):
            text = text[:-1].rstrip()
    for pattern, better in _REWRITTEN:
        text = pattern.sub(better, text).strip()
    if number := _EXPONENT.fullmatch(text):
        return f"{number[1]}\\times 10^{{{number[2]}}}"
    if mixed := _MIXED.fullmatch(text):
        sign, whole, *some, percent = mixed.groups(default="")
        above, below = (int(each) for each in some if each)
        return f"{sign}\\frac{{{int(whole) * below + above}}}{{{below}}}{percent}"
    if repeating := _REPEATING.fullmatch(text):
        sign, whole, once, again = repeating.groups()
        above = int(whole + once + again) - int(f"0{whole}{once}")
        return f"{sign}\\frac{{{above}}}{{{'9' * len(again)}{'0' * len(once)}}}"
    return text


def by_text(gold: str, text: str) -> bool | None:
    """Whether readable answers are equal, where only their texts tell; None where they do not.

    A number with the index of its base, a word, a time of the day, and a list of whole numbers,
    which math-verify takes for a number, a product of letters, a ratio, and one number; and words
    that it leaves out though they change the answer."""
    if not _changing(text) <= _changing(gold):
        return False
    bases = [_BASED.fullmatch(each) for each in (gold, text)]
    if bases[0] and bases[1]:
        return bases[0].groups() == bases[1].groups()
    if _WORDS.fullmatch(gold) and _WORDS.fullmatch(text):
        return gold.casefold().split() == text.casefold().split()
    choices = [_CHOICE.fullmatch(plain(each)) for each in (gold, text)]
    if choices[0] and choices[1]:
        return len({each[1] or each[2] for each in choices if each}) == 1
    if _WORDS.fullmatch(gold) and _CHOICES.fullmatch(text):
        return gold == re.sub(r"[\s,]", "", text)
    if sorted(gold.replace(" ", "").split(",")) == sorted(text.replace(" ", "").split(",")):
        return True
    if {_bracket(gold), _bracket(text)} in ({"\\{", "("}, {"\\{", "["}):
        return False  # math-verify takes (1,2) for a set as well
    clock, other = _clock(gold), _clock(text)
    if clock is not None and (clock[3] or other is not None):
        return other is not None and (other == clock or (not clock[3] and other[:3] == clock[:3]))
    lists = [_items(gold), _items(text)]
    if lists[0] and not lists[1] and _LIST.fullmatch(text):
        lists[1] = sorted(re.findall(r"[-+]?\d+", text))  # 123,456 for 123, 456
    if lists[0] and lists[1]:
        return lists[0] == lists[1]
    if any(lists) and all(re.fullmatch(r"[-+\d., ]+", each, re.ASCII) for each in (gold, text)):
        return False
    return None


def _unwrapped(text: str) -> str:
    """The content of braces, dollar signs or one style around the whole answer."""
    if len(text) > 2 and text[0] == text[-1] == "$":
        return text[1:-1]
    styled = _STYLED.match(text)
    start = styled.end() if styled else 1
    if text[start - 1 : start] != "{" or not text.endswith("}"):
        return text
    depth = 1
    for index in range(start, len(text)):
        if text[index] in "{}" and text[index - 1] != "\\":
            depth += 1 if text[index] == "{" else -1
        if depth == 0:
            inner = text[start:index]
            return inner if index == len(text) - 1 and _is_safe(styled is None, inner) else text
    return text


def _is_safe(plain: bool, inner: str) -> bool:
    """Whether a style around an answer says nothing: words of a text are no product of letters."""
    return (
        plain
        or not re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", inner))
        or _LEAD.match(inner) is not None
        or _clock(inner) is not None
        or _WORDS.fullmatch(inner.strip()) is not None
    )


def _without_lead(text: str) -> str:
    styled = _STYLED_LEAD.match(text)
    if styled and _LEAD.fullmatch(styled[1].strip() + " "):
        return text[styled.end() :]
    lead = _LEAD.match(text)
    return text[lead.end() :] if lead else text


def plain(text: str) -> str:
    """A text without styles and braces."""
    return " ".join(re.sub(_STYLES + r"|[{}~\\]", " ", text).split())


def _bracket(text: str) -> str:
    """The bracket around a whole answer, without its size."""
    found = re.match(r"(?:\\left\s*)?(\\\{|[(\[])", text)
    return found[1] if found and text[-1:] in ")]}" else ""


def _clock(text: str) -> tuple[str, str, str, str] | None:
    if (found := _CLOCK.fullmatch(plain(text))) is None:
        return None
    hour, minute, second, half = found.groups(default="")
    return str(int(hour)), minute, second, half.lower()


def _changing(text: str) -> set[str]:
    return {found.casefold() for found in _CHANGING.findall(text)}


def _items(text: str) -> list[str] | None:
    """The whole numbers of a list, sorted; None for what is none, such as 1,234."""
    if _THOUSANDS.fullmatch(text) or not _LIST.fullmatch(text):
        return None
    return sorted(item.strip() for item in text.split(","))
