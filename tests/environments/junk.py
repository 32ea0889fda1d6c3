"""Texts that deserve no reward: what a policy that learns, or a hostile one, may write.

`junk(count, seed)` makes them without end in equal shares of `KINDS`. None holds a right answer to
any of `GOLDS`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

GOLDS = (
    r"\frac{8675309}{2718281}",
    r"31337\sqrt{7919}",
    r"x^2\ln(y)+7411",
    r"\{-7919, 104729\}",
    r"[-7919, 104729)",
    r"\begin{pmatrix}7919&1\\0&104729\end{pmatrix}",
    r"104729",
    r"z=104729",
)
"""Answers that no junk equals by chance."""

LONG = 1_000_000
COMMANDS = (
    "frac", "sqrt", "sum", "int", "prod", "lim", "binom", "left(", "right)", "begin{pmatrix}",
    "end{pmatrix}", "text{or}", "infty", "pi", "cdot", "times", "log", "sin", "boxed", "overline",
    "mathbb{R}", "le", "cup", "pm", "circ", "%", "$", "\\", "{", "}", "not", "def\\a{\\a}", "dots",
)  # fmt: skip


def _box(content: str) -> str:
    return f"The answer is \\boxed{{{content}}}."


def _nested(draw: random.Random) -> str:
    depth = draw.choice([3, 11, 50, 1000, 100_000])
    opening, closing = draw.choice(["{}", "()", "[]", ("\\sqrt{", "}"), ("\\frac{1}{", "}")])
    return _box(opening * depth + "1" + closing * draw.choice([depth, depth - 1, 0]))


def _powers(draw: random.Random) -> str:
    base = [str(draw.randint(2, 10 ** draw.randint(1, 30))) for _ in range(draw.randint(2, 6))]
    sign = draw.choice(["^", "^{-", "^{1/", "!^{", "**"])
    closing = "}" * (len(base) - 1) if "{" in sign else ""
    return _box(sign.join(base) + closing + draw.choice(["", "!", "!!", "\\%"]))


def _unicode(draw: random.Random) -> str:
    points = [draw.randint(1, 0x2FFFF) for _ in range(draw.randint(1, 300))]
    text = "".join(chr(p) for p in points if not 0xD800 <= p < 0xE000)
    return draw.choice([text, _box(text), _box("٣" * 40), _box("½⅓²³∞√π≤"), "\0" + _box("\0")])


def _long(draw: random.Random) -> str:
    filling = draw.choice(
        ["9", "{", "\\boxed{", "\\boxed{1}", "((", "\\frac", "1+", " ", "$", "\n"]
    )
    text = filling * (LONG // len(filling))
    return draw.choice([text, _box(text), "\\boxed{" + text])


def _bombs(draw: random.Random) -> str:
    n = draw.randint(5, 10**9)
    bomb = draw.choice(
        [
            "9^{9^{9^9}}", f"{n}!", f"({n}!)!", f"\\binom{{{n}}}{{{n // 2}}}", f"2^{{2^{{{n}}}}}",
            f"\\sum_{{i=1}}^{{{n}}} \\frac{{1}}{{i}}", f"\\prod_{{i=1}}^{{{n}}} i",
            f"(x+y)^{{{n}}}",
            f"\\int_0^{{{n}}} \\sin(x^x) e^{{e^x}} dx", f"\\lim_{{x\\to {n}}} x^x",
            "\\sqrt{" * 9 + "x+1" + "}+1" * 9, f"\\sin({n}^{{{n}}})", f"10^{{-{n}}}",
            f"{n}^{{0.1}}",
            f"\\frac{{1}}{{{n}^{{{n}}}}}", "(a+b+c+d+e)^9(a-b+c-d)^9", f"e^{{{n}}}", f"\\ln({n}!)",
            "\\sin(" * 9 + "x" + ")" * 9, "|" * 40 + "x" + "|" * 40, "x_{1_{2_{3_{4}}}}",
            "1e999999",
            f"\\frac{{d^{{{n}}}}}{{dx^{{{n}}}}} x^x",
            "\\begin{pmatrix}" + "1&" * 99 + "\\end{pmatrix}",
            f"\\{{1,\\ldots,{n}\\}}", f"\\log_{{{n}}} {n}^{{{n}}}", f"\\gcd({n}!,{n})",
            f"0.{'9' * 50}",
            f"\\overline{{{'7' * 50}}}", f"{n} \\mod 0", "\\frac{0}{0}", "\\tan(\\frac{\\pi}{2})",
        ]
    )  # fmt: skip
    return _box(bomb)


def _latex(draw: random.Random) -> str:
    parts = []
    for _ in range(draw.randint(1, 40)):
        chosen = draw.random()
        if chosen < 0.5:
            parts.append("\\" + draw.choice(COMMANDS))
        elif chosen < 0.7:
            parts.append("{" + str(draw.randint(-99, 99)) + "}")
        else:
            parts.append(draw.choice("+-*/^_=<>!,;|&xyz0123456789 ()[]{}$%"))
    return _box("".join(parts))


def _expression(draw: random.Random, depth: int = 3) -> str:
    """A well-formed expression, and wrong."""
    if depth == 0 or draw.random() < 0.15:
        return draw.choice(["x", "y", "\\pi", "e", str(draw.randint(0, 99)), "0.5", "i"])
    left, right = _expression(draw, depth - 1), _expression(draw, depth - 1)
    return draw.choice(
        [
            f"({left}+{right})", f"({left}-{right})", f"{left}\\cdot {right}",
            f"\\frac{{{left}}}{{{right}}}", f"\\sqrt{{{left}}}", f"\\sin({left})",
            f"{{{left}}}^{{2}}",
            f"\\ln({left})", f"e^{{{left}}}", f"|{left}|", f"{{{left}}}^{{{right}}}",
        ]
    )  # fmt: skip


def _expressions(draw: random.Random) -> str:
    return _box(draw.choice(["", "x=", "y<"]) + _expression(draw))


def _without_box(draw: random.Random) -> str:
    gold = draw.choice(GOLDS)
    return draw.choice(
        [
            gold, f"\\boxed {gold}", f"\\boxed{{{gold}", f"\\boxed{{}} {gold}", f"${gold}$",
            f"\\boxed{{{gold}}} or rather \\boxed{{0}}", f"\\Boxed{{{gold}}}", f"boxed{{{gold}}}",
            "", " ", "\\boxed{ }", "\\boxed", f"\\boxed{{{gold}\\}}", f"answer: {gold}",
            "\\boxed{" + " \\text{ or } ".join(GOLDS) + "}", "\\boxed{" + ", ".join(GOLDS) + "}",
            f"\\boxed{{{gold} \\text{{ or }} 1}}", f"\\boxed{{{gold}, 1, 2, 3}}",
            f"\\boxed{{\\text{{{gold} is wrong}}}}", "\\boxed{\\text{gold}}", "\\boxed{gold}",
        ]
    )  # fmt: skip


def _python(draw: random.Random) -> str:
    return _box(
        draw.choice(
            [
                "__import__('os').system('true')", "exec('while True: pass')",
                "open('/etc/passwd')",
                "10**10**10", "[0]*10**10", "lambda: 0", "Symbol('x')", "sympy.oo", "eval('1')",
                "factorial(10**9)", "S.Infinity", "float('nan')", "nan", "True", "None", "zoo",
            ]
        )
    )  # fmt: skip


KINDS: dict[str, Callable[[random.Random], str]] = {
    "nested": _nested,
    "powers": _powers,
    "unicode": _unicode,
    "long": _long,
    "bombs": _bombs,
    "latex": _latex,
    "expressions": _expressions,
    "unboxed": _without_box,
    "python": _python,
}


def junk(count: int, seed: int = 0) -> Iterator[tuple[str, str, str]]:
    """`count` times (kind, gold answer, junk text)."""
    draw = random.Random(seed)
    for number in range(count):
        kind = list(KINDS)[number % len(KINDS)]
        yield kind, draw.choice(GOLDS), KINDS[kind](draw)
