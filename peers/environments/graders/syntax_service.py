"""The process that finds the program in a completion, before a sandbox is made for it."""

import ast
import warnings
from typing import Any

DATA = (ast.Constant, ast.Name, ast.Attribute, ast.List, ast.Tuple, ast.Dict, ast.Set)
DATA_OPERATORS = (ast.UnaryOp, ast.BinOp, ast.Compare)
"""Of these an example of input or output consists, where it happens to be Python."""


class SyntaxService:
    """Says which of some texts is the program, for the interpreter that would run it."""

    def __init__(self) -> None:
        warnings.simplefilter("ignore")

    def __call__(self, request: dict[str, Any]) -> int:
        """The index of the first program, if possible one that defines the function; -1: none."""
        programs = -1
        for index, source in enumerate(request["sources"]):
            if (tree := _program(source)) is None:
                continue
            if not request["function"] or _defines(tree, request["function"]):
                return index
            programs = index if programs < 0 else programs
        return programs


def _program(source: str) -> ast.Module | None:
    try:
        tree = ast.parse(source)
        compile(source, "solution.py", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        return None
    return None if all(map(_is_data, tree.body)) else tree


def _is_data(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, DATA + DATA_OPERATORS)


def _defines(tree: ast.Module, function: str) -> bool:
    nodes = [node for each in tree.body for node in (each, *getattr(each, "body", ()))]
    return any(function in _names(node) for node in nodes)


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]
