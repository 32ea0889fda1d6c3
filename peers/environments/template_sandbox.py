"""Jinja for templates of strangers: what one rendering may compute is counted, not timed.

A task whose prompt cannot be rendered is passed over, and worker and validator must pass over the
same ones. So a template is stopped by bounds on sizes and operations, which are the same on every
machine, and never by a clock or by memory that runs out.

Work is charged before it is done. An operation costs `OPERATION`, and as much as the values that
it reads are large; values are texts of `TEXT_MAX` characters at most, and containers of `NODES_MAX`
values. Whatever could make a larger one is computed by hand here, or not there.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import BuiltinMethodType, ClassMethodDescriptorType, MethodDescriptorType
from typing import Any, cast

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox
from jinja2.utils import Namespace, pass_context

WORK_MAX = 1 << 27
"""Units of work of one rendering; one is about ten nanoseconds, and one character read."""

OPERATION = 512
NODE = 4
"""Of each node of a block that is entered: a test of a variable costs little, but there may be
50,000 in a loop."""

TEXT_MAX = 1 << 22
"""Characters of a text that a template makes; no model reads a prompt as long."""

NODES_MAX = 100_000
VALUE = 32
"""Size of each value, beside its characters."""
DEPTH_MAX = 50
"""Depth of containers and of calls of macros. Python's own limit depends on who calls."""

INTEGER_BITS_MAX = 4096

METHODS: Mapping[type, frozenset[str]] = {
    str: frozenset({
        "capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdecimal",
        "isdigit", "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower",
        "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex",
        "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip",
        "swapcase", "title", "upper",
    }),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    int: frozenset({"bit_length"}),
    float: frozenset({"is_integer"}),
    datetime.date: frozenset({"strftime"}),
}  # fmt: skip
"""Methods that a template may call on values of Python's own types; none makes much of little."""

_PLAIN = tuple(METHODS)
_NATIVE = (BuiltinMethodType, MethodDescriptorType, ClassMethodDescriptorType)

_PRODUCTS = frozenset({"lstrip", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "strip"})
"""Methods that may compare each character of the text with each of the argument."""

_FILTERS = frozenset({
    "abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float",
    "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min",
    "reject", "rejectattr", "replace", "reverse", "safe", "select", "selectattr", "sort",
    "string", "sum", "title", "trim", "unique", "upper",
})  # fmt: skip
"""Jinja's filters that chat templates use. Others are slow, not the same on every machine, or make
much of little."""

_SLOW = 16
"""Units of a filter for each character and value that it reads."""
_FAST = 4


class _Budget:
    """The work that a rendering may still do."""

    def __init__(self) -> None:
        self.left = WORK_MAX
        self.depth = 0


_budget: ContextVar[_Budget] = ContextVar("budget")


@contextmanager
def limited() -> Iterator[_Budget]:
    """Bound the work of the renderings in this block, which together have `WORK_MAX`."""
    token = _budget.set(budget := _Budget())
    try:
        yield budget
    finally:
        _budget.reset(token)


def _charge(units: int) -> None:
    budget = _budget.get(None)
    if budget is None:  # constants of the template itself, as it is compiled
        return
    budget.left -= units
    if budget.left < 0:
        raise jinja2.TemplateError(f"it computes more than {WORK_MAX} units of work")


def _refuse(what: str) -> jinja2.TemplateError:
    return jinja2.TemplateError(f"it computes {what}")


def _size(value: Any) -> int:
    """Characters and values in `value`; raises `TemplateError` for what is too large or deep."""
    kind = type(value)
    if kind is str:
        if len(value) > TEXT_MAX:
            raise _refuse(f"a text of {len(value)} characters; at most {TEXT_MAX} are allowed")
        return len(value)
    if kind is bool or value is None or kind is float:
        return 1
    total, nodes, waiting = 0, 0, [(value, 0)]
    while waiting:
        each, depth = waiting.pop()
        nodes += 1
        if nodes > NODES_MAX or depth > DEPTH_MAX or total > TEXT_MAX:
            raise _refuse("values that are too large or too deep")
        inner: Iterable[Any] = ()
        if isinstance(each, str):
            total += len(each)
        elif isinstance(each, int):
            total += each.bit_length()
            if each.bit_length() > INTEGER_BITS_MAX:
                raise _refuse("integers that are too large")
        elif isinstance(each, Mapping):
            inner = [part for pair in each.items() for part in pair]
        elif isinstance(each, range):
            nodes += len(each)
        elif isinstance(each, Namespace):
            inner = list(object.__getattribute__(each, "_Namespace__attrs").values())
        elif isinstance(each, (Sequence, *_VIEWS)):
            inner = cast("Iterable[Any]", each)
        for part in inner:
            waiting.append((part, depth + 1))
            if len(waiting) > NODES_MAX:
                raise _refuse("values that are too large or too deep")
        total += VALUE
    _charge(nodes * 64)
    return total


_VIEWS: tuple[type, ...] = (type({}.items()), type({}.keys()), type({}.values()), set, frozenset)


def _bounded(characters: int) -> None:
    """Charge a text that will be made; raises `TemplateError` if it would be too long."""
    if characters > TEXT_MAX:
        raise _refuse(f"a text of more than {TEXT_MAX} characters")
    _charge(4 * characters)


def _replaced(text: str, old: str, new: str) -> None:
    """Charge the replacement of all `old`."""
    _bounded(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja as transformers sets it up for chat templates, within bounds.

    Unlike there, a template has neither the time of day nor anything random, and no `format`.
    """

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, jinja2.ext.loopcontrols],
        )
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise
        self.filters = {name: _filter(name, self.filters[name]) for name in _FILTERS}
        self.filters["tojson"] = _filter("tojson", _to_json)
        self.filters["counted"] = _counted
        tests: dict[str, Any] = self.tests
        self.tests = {name: _test(each) for name, each in tests.items()}

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(jinja2.nodes.For)):
            if loop.test is not None:  # it runs for items, too, for which no block is entered
                nodes = jinja2.nodes.Const(_count_nodes([loop.test]))
                loop.iter = jinja2.nodes.Filter(loop.iter, "counted", [nodes], [], None, None)
                loop.iter.set_lineno(loop.lineno).set_environment(self)
        return tree

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Join what a block has written."""
        kept, length = [], 0
        for part in parts:
            kept.append(part)
            length += len(part)
            if length > TEXT_MAX:
                raise jinja2.TemplateError(f"it writes more than {TEXT_MAX} characters")
        _bounded(length)
        return "".join(kept)

    def entered(self, nodes: int) -> None:
        """Charge a block of the template, each time that it is entered."""
        _charge(OPERATION + NODE * nodes)

    def weighed(self, value: Any) -> Any:
        """Charge an operation that reads a value."""
        _charge(OPERATION + _size(value))
        return value

    def copied(self, value: Any) -> Any:
        """Charge a slice of a value."""
        _charge(_FAST * _size(value))
        return self.weighed(value)

    def joined(self, values: Sequence[Any]) -> str:
        """The operator `~`."""
        return self.concat([str(self.weighed(each)) for each in values])

    def getattr(self, obj: Any, attribute: str) -> Any:
        _charge(OPERATION)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        _charge(OPERATION)
        _size(argument)
        return super().getitem(obj, argument)

    def call(
        self, context: jinja2.runtime.Context, called: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        kwargs_given = {key: each for key, each in kwargs.items() if key != "_loop_vars"}
        _charge(OPERATION + _size(args) + _size(kwargs_given))
        if isinstance(called, _NATIVE) or isinstance(getattr(called, "__self__", None), _PLAIN):
            _charge_method(called, args, kwargs_given)
        budget = _budget.get()
        budget.depth += 1
        try:
            if budget.depth > DEPTH_MAX:
                raise _refuse(f"calls more than {DEPTH_MAX} deep")
            result = super().call(context, called, *args, **kwargs)
        finally:
            budget.depth -= 1
        if isinstance(result, _PLAIN):
            _charge(_FAST * _size(result))
        return result

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        self.weighed(left), self.weighed(right)
        if operator == "**":
            raise _refuse("** of large operands")
        if operator == "*":
            factors = [abs(e) if isinstance(e, int | float) else _size(e) for e in (left, right)]
            if not factors[0] * factors[1] <= TEXT_MAX:
                raise _refuse("* of large operands")
            _bounded(int(factors[0] * factors[1]))
        elif operator == "%" and isinstance(left, str):
            raise _refuse("% of a text")
        elif operator == "+":
            _bounded(_size(left) + _size(right))
        result = super().call_binop(context, operator, left, right)
        _size(result)
        return result

    def wrap_str_format(self, value: Any) -> None:
        """No method that formats is safe: `call` refuses them all."""


class _Generator(jinja2.compiler.CodeGenerator):
    """Writes the Python of a template, with a charge for what Jinja computes without a call."""

    def blockvisit(self, nodes: Iterable[jinja2.nodes.Node], frame: jinja2.compiler.Frame) -> None:
        block = list(nodes)
        self.writeline(f"environment.entered({_count_nodes(block)})")
        super().blockvisit(block, frame)

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        self.write("environment.joined((")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")

    def visit_Compare(self, node: jinja2.nodes.Compare, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        self.write("(")
        self._weigh(node.expr, frame)
        for each in node.ops:
            self.write(f" {jinja2.compiler.operators[each.op]} ")
            self._weigh(each.expr, frame)
        self.write(")")

    def visit_Getitem(self, node: jinja2.nodes.Getitem, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        if isinstance(node.arg, jinja2.nodes.Slice):  # Jinja asks its environment for no slices
            self.write("environment.copied(")
            self.visit(node.node, frame)
            self.write(")[")
            self.visit(node.arg, frame)
            self.write("]")
        else:
            super().visit_Getitem(node, frame)

    def visit_Tuple(self, node: jinja2.nodes.Tuple, frame: jinja2.compiler.Frame) -> None:  # noqa: N802
        made = node.ctx == "load"
        self.write("environment.weighed(" if made else "")
        super().visit_Tuple(node, frame)
        self.write(")" if made else "")

    def _weigh(self, node: jinja2.nodes.Node, frame: jinja2.compiler.Frame) -> None:
        self.write("environment.weighed(")
        self.visit(node, frame)
        self.write(")")

    def _output_child_pre(self, node: Any, frame: jinja2.compiler.Frame, finalize: Any) -> None:
        super()._output_child_pre(node, frame, finalize)
        self.write("environment.weighed(")

    def _output_child_post(self, node: Any, frame: jinja2.compiler.Frame, finalize: Any) -> None:
        self.write(")")
        super()._output_child_post(node, frame, finalize)


Sandbox.code_generator_class = _Generator


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` blocks, which mark the model's tokens for other trainers."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def _charge_method(method: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Charge a method of one of Python's own types; raises `TemplateError` for unknown ones."""
    owner, name = getattr(method, "__self__", None), method.__name__
    allowed = next((METHODS[kind] for kind in type(owner).__mro__ if kind in METHODS), frozenset())
    if name not in allowed:
        raise _refuse(f"{type(owner).__name__}.{name}, which templates may not call")
    size, given = _size(owner), [*arguments, *named.values()]
    _charge(_FAST * size)
    if name == "strftime" and re.search(r"\d", str(given)):
        raise _refuse("dates of a chosen width")
    if not isinstance(owner, str):
        return
    if name in _PRODUCTS:
        _charge(size * max((len(e) for e in given if isinstance(e, str)), default=1))
    elif name == "replace":
        if len(arguments) >= 2 and all(isinstance(each, str) for each in arguments[:2]):
            _replaced(owner, arguments[0], arguments[1])
    elif name == "join":
        parts = given[0] if given else ()
        if hasattr(parts, "__len__"):
            _bounded(size * len(parts) + _size(parts))
        else:
            raise _refuse("join of something without a length")


def _filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that is charged."""
    passed = getattr(function, "jinja_pass_arg", None)

    @pass_context
    def charged(context: jinja2.runtime.Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        size = _size(value) + _size(given)
        _charge(OPERATION + _SLOW * size)
        _charge_filter(name, value, args, kwargs)
        first = {
            None: (),
            "context": (context,),
            "eval_context": (context.eval_ctx,),
            "environment": (context.environment,),
        }[passed.name if passed is not None else None]
        result = function(*first, value, *args, **kwargs)
        if isinstance(result, Iterator):
            result = list(_items(result))
        if isinstance(result, _PLAIN):
            _charge(_FAST * _size(result))
        return result

    return charged


def _charge_filter(name: str, value: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse what a filter would make too much of."""
    given = [*args, *kwargs.values()]
    if name == "indent":
        _bounded(_size(value) + (len(str(value).splitlines()) + 2) * _width(given))
    elif name == "replace":
        old, new = (str(each) for each in (*given, "", "")[:2])
        _replaced(str(value), old, new)
    elif name == "join":
        count = len(value) if hasattr(value, "__len__") else NODES_MAX
        _bounded(_size(value) + count * _size(given))
    elif name == "sum":
        start = kwargs.get("start", args[1] if len(args) > 1 else 0)
        if not isinstance(start, int | float):
            raise _refuse("sums of something else than numbers")
    elif name == "tojson":
        widest = _width(kwargs.get("separators") or ()) + DEPTH_MAX * _width([kwargs.get("indent")])
        _bounded(_size(value) * (2 + widest // VALUE))


def _width(given: Iterable[Any]) -> int:
    """Characters that texts and numbers of blanks take."""
    return sum(abs(int(e)) if isinstance(e, int | float) else len(str(e or "")) for e in given)


def _items(values: Iterable[Any]) -> Iterator[Any]:
    for each in values:
        _charge(OPERATION)
        yield each


def _count_nodes(block: Iterable[jinja2.nodes.Node]) -> int:
    return sum(1 + sum(1 for _ in each.find_all(jinja2.nodes.Node)) for each in block)


@pass_context
def _counted(context: jinja2.runtime.Context, values: Any, nodes: int) -> Any:
    """What a loop with a condition goes through."""
    if not hasattr(values, "__len__"):
        return values
    _charge(len(values) * (OPERATION + NODE * nodes))
    return values


def _test(function: Callable[..., Any]) -> Callable[..., Any]:
    """A test that is charged."""
    if hasattr(function, "jinja_pass_arg"):
        return function

    def charged(*arguments: Any) -> Any:
        _charge(OPERATION + _size(list(arguments)))
        return function(*arguments)

    return charged


def _to_json(value: Any, ensure_ascii: bool = False, **settings: Any) -> str:
    """The filter `tojson` of transformers, which does not escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **settings)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
