"""The forms in which public data sets publish hidden tests, all read into the same cases."""

import ast
import base64
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

import msgspec

TESTS_BYTES_MAX = 16 << 20
"""All inputs and outputs of a task as JSON."""
ASSERTIONS_CHARACTERS_MAX = 1 << 18
NESTING_MAX = 6
INTEGER_DIGITS_MAX = 4300
"""Longer whole numbers are decimals here: Python refuses to read them as integers."""

CONTAINERS = ("tests", "test_cases", "input_output", "test_list", "test", "ground_truth")
"""Columns and keys that hold all tests."""
PARTS = (
    *("public_tests", "private_tests", "generated_tests"),
    *("public_test_cases", "private_test_cases", "official_tests"),
)
"""Columns and keys that hold a part of the tests each."""
_INPUTS, _OUTPUTS = ("input", "inputs", "stdin"), ("output", "outputs", "expected_output", "stdout")
_FUNCTIONS = ("fn_name", "func_name", "function_name", "entry_point")
SUBJECT = "candidate"
"""What HumanEval's assertions call the function that the column `entry_point` names."""


class Written(msgspec.Struct, frozen=True):
    """Arguments as Python writes them: text of a tuple of a list and a dictionary."""

    text: str


class Case(msgspec.Struct, frozen=True):
    """One test, as its record has it."""

    given: Any
    accepted: Sequence[Any]
    """Outputs any of which is right."""
    function: str | None = ""
    """What is called; empty: the record may name it elsewhere; None: standard input is read."""
    is_list_of_arguments: bool = False
    """Whether text holds a list of all arguments, and not one argument a line."""


def cases_in(given: Any, depth: int = 0) -> list[Case]:
    """The cases of a record, or of a value in it; raises `ValueError` or `RecursionError`."""
    if depth > NESTING_MAX:
        raise ValueError("they are nested too deeply")
    if isinstance(given, str):
        return _in_text(given, depth + 1)
    if isinstance(given, Mapping):
        return _in_table(given, depth + 1)
    if isinstance(given, (list, tuple)) and all(isinstance(each, str) for each in given):
        return _in_assertions("\n".join(given))
    if isinstance(given, (list, tuple)) and all(isinstance(each, Mapping) for each in given):
        return [_case(each) for each in given]
    raise ValueError("their form is unknown")


def _in_table(given: Mapping[str, Any], depth: int) -> list[Case]:
    """A table of two lists, or a table or row with the tests under one key, or in parts."""
    for names in (("inputs", "outputs"), ("input", "output")):
        inputs, outputs = map(given.get, names)
        if isinstance(inputs, (list, tuple)) and isinstance(outputs, (list, tuple)):
            if len(inputs) != len(outputs):
                raise ValueError(f"they have {len(inputs)} inputs and {len(outputs)} outputs")
            found = [Case(each, [output]) for each, output in zip(inputs, outputs, strict=True)]
            break
    else:
        held = next(([given[key]] for key in CONTAINERS if given.get(key)), None)
        parts = held or [given[key] for key in PARTS if given.get(key)]
        if not parts:
            raise ValueError("their form is unknown")
        found = [case for each in parts for case in cases_in(each, depth)]
    name = _function(given)
    return [msgspec.structs.replace(e, function=name) if e.function == "" else e for e in found]


def _case(given: Mapping[str, Any]) -> Case:
    kind = given.get("type") or given.get("testtype")
    inputs, outputs = ([given[key] for key in keys if key in given] for keys in (_INPUTS, _OUTPUTS))
    several = given.get("accepted_outputs")
    accepted = several if isinstance(several, list) and several else outputs[:1]
    if not inputs or not accepted:
        raise ValueError(f"a case has no {'output' if inputs else 'input'}")
    function = None if kind in ("stdin_stdout", "stdin") else _function(given)
    return Case(inputs[0], accepted, function, kind == "function_call")


def _function(table: Mapping[str, Any]) -> str:
    """The function that a case, a table or a row names, itself or in its `metadata`."""
    metadata = table.get("metadata")
    if isinstance(metadata, str) and metadata.startswith("{"):
        metadata = loads(metadata)
    tables = [each for each in (table, metadata) if isinstance(each, Mapping)]
    names = [each[key] for each in tables for key in _FUNCTIONS if each.get(key)]
    return str(names[0]) if names else ""


def _in_text(given: str, depth: int) -> list[Case]:
    """JSON, assertions in a function (HumanEval), or LiveCodeBench's private tests."""
    if len(given) > TESTS_BYTES_MAX:
        raise ValueError(f"they take {len(given)} characters")
    try:
        value = loads(given)
    except ValueError:
        if "assert" in given:
            return _in_assertions(given)
        value = loads(_unpacked(given))
    return cases_in(value, depth)


def _in_assertions(text: str) -> list[Case]:
    """The cases of the assertions in a program: MBPP, AceCode, HumanEval."""
    if len(text) > ASSERTIONS_CHARACTERS_MAX:
        raise ValueError(f"assertions take {len(text)} characters")
    try:
        nodes = ast.walk(ast.parse(text))
    except (SyntaxError, MemoryError) as error:
        raise ValueError(f"assertions are no Python ({error})") from error
    tests = [node.test for node in nodes if isinstance(node, ast.Assert)]
    return [case for test in tests for case in _compared(test)]


def _compared(test: ast.expr) -> Iterator[Case]:
    """The case of `f(…) == value`, or of `f(…) in (value, …)`; raises `ValueError` for others."""
    match test:
        case ast.Constant(True):  # HumanEval's, with a word for people
            return
        case ast.Compare(ast.Call(ast.Name(name)) as call, [ast.Eq() | ast.Is()], [right]):
            accepted = [right]
        case ast.Compare(left, [ast.Eq()], [ast.Call(ast.Name(name)) as call]):
            accepted = [left]
        case ast.Compare(
            ast.Call(ast.Name(name)) as call, [ast.In()], [ast.List(some) | ast.Tuple(some)]
        ):
            accepted = some
        case _:
            raise ValueError(f"assert {ast.unparse(test):.60} is not of the form f(…) == value")
    try:
        named = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        written = repr(([ast.literal_eval(each) for each in call.args], named))
        values = [as_json(ast.literal_eval(each)) for each in accepted]
    except (ValueError, TypeError) as error:
        raise ValueError(f"assert {ast.unparse(test):.60} holds more than values") from error
    yield Case(Written(written), values, "" if name == SUBJECT else name)


def _unpacked(text: str) -> str:
    """The JSON in base64 of zlib of a pickle, which is read, never run; raises `ValueError`."""
    import pickletools

    try:
        packed = base64.b64decode(text, validate=True)
        pickled = zlib.decompressobj().decompress(packed, TESTS_BYTES_MAX)
        found = [each for _, each, _ in pickletools.genops(pickled) if isinstance(each, str)]
    except (ValueError, zlib.error) as error:
        raise ValueError("they are neither JSON, assertions nor packed JSON") from error
    if len(found) != 1:
        raise ValueError("they are packed, but not one text")
    return found[0]


def loads(text: str) -> Any:
    """Decode JSON; raises `ValueError` or `RecursionError`."""

    def integer(digits: str) -> int | Decimal:
        return int(digits) if len(digits) <= INTEGER_DIGITS_MAX else Decimal(digits)

    return json.loads(text, parse_int=integer)


def as_json(value: Any) -> Any:
    """A Python value as JSON has it, with sets as the harness writes them; raises `TypeError`."""

    def unordered(inner: Any) -> Any:
        if isinstance(inner, (set, frozenset)):
            return {"set": sorted(json.dumps(each, default=unordered) for each in inner)}
        raise TypeError(f"{inner!r:.60} is not JSON")

    return loads(json.dumps(value, default=unordered))
