"""The process that finds programs which are not Python, before a sandbox is made for them."""

from __future__ import annotations

import warnings


class SyntaxService:
    """Says whether a program compiles, with the interpreter that would run it."""

    def __init__(self) -> None:
        warnings.simplefilter("ignore")

    def __call__(self, source: str) -> bool:
        try:
            compile(source, "solution.py", "exec")
        except (SyntaxError, ValueError, OverflowError, RecursionError):
            return False
        return True
