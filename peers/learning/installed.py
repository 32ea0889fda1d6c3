"""Objectives and advantages of other packages: found by their entry points, pinned by a hash.

`docs/objectives.md` shows how to write one. Only a run's owner and its trainers need the package.
"""

import difflib
import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

import msgspec
import torch
from torch import Tensor

from swarm.errors import UserError
from swarm.rollouts.seeds import digest
from swarm.wire.manifest import ADVANTAGES, OBJECTIVES, Objective

Kind = Literal["objective", "advantage"]

FIELDS: dict[Kind, tuple[str, str, tuple[str, ...]]] = {
    "objective": ("name", "options", OBJECTIVES),
    "advantage": ("advantage", "advantage_options", ADVANTAGES),
}
"""Fields of `Objective` with a formula's name and its options, and the names that are built in."""


class FormulaError(Exception):
    """A formula of another package raised, or returned what no step can be trained with."""


def compute(
    kind: Kind,
    built_in: Mapping[str, Callable[..., Any]],
    objective: Objective,
    given: Any,
    like: Tensor,
    problems: list[str] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """What the chosen formula makes of `given`: a number for each of `like` [n], and masks.

    If a formula of another package fails, `problems` gets a sentence and the numbers are NaN;
    without `problems`, the `FormulaError` is raised. Its masks count as one, so that metrics have
    the same names on all ranks, even if it fails on one of them. Raises `UserError` as `find`."""
    name = getattr(objective, FIELDS[kind][0])
    function, options = find(kind, built_in, objective)
    if name in built_in:
        found = function(objective, given, **options)
        return found if isinstance(found, tuple) else (found, {})
    none, problem = torch.zeros_like(like, dtype=torch.bool), ""
    if not len(like):  # a rank without a sequence of this batch
        return like + 0, {"outside_formula": none}
    # It may change what it is given: KL and metrics need the same tensors.
    copies = {n: each.clone() for n, each in vars(given).items() if isinstance(each, Tensor)}
    try:
        found = function(objective, replace(given, **copies), **options)
        numbers, masks = found if isinstance(found, tuple) else (found, {})
        numbers = torch.as_tensor(numbers).to(like)  # of whatever type and device it is
        left_alone = torch.stack([none, *masks.values()]).any(0)
        if numbers.shape != like.shape:
            problem = f"it returned the shape {list(numbers.shape)}, not {list(like.shape)}"
        elif not numbers.isfinite().all():
            problem = "it returned a number that is not finite"
        elif like.requires_grad and not numbers.requires_grad:
            problem = "its loss does not depend on tokens.log_pi"
    except (Exception, SystemExit) as error:  # a package of others may do anything
        problem = f"{type(error).__name__}: {error!s:.500}"
    if problem:
        problem = f"the {kind} {name!r} failed: {problem}"
        if problems is None:
            raise FormulaError(problem)
        problems.append(problem)
        return like * torch.nan, {"outside_formula": none}
    return numbers, {"outside_formula": left_alone}


def find(
    kind: Kind, built_in: Mapping[str, Callable[..., Any]], objective: Objective
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The chosen formula and its options as keyword arguments; raises `UserError`."""
    name, field = getattr(objective, FIELDS[kind][0]), FIELDS[kind][1]
    function = built_in[name] if name in built_in else _loaded(kind, name)
    known = _keywords(function)
    found: dict[str, Any] = {}
    for option, value in getattr(objective, field).items():
        if option not in known:
            there = ", ".join(known) or "none"
            raise UserError(f"objective.{field} has {option!r}; the {kind} {name!r} takes: {there}")
        try:
            if get_origin(known[option]) is dict and isinstance(value, list):
                # A table travels as texts, see `swarm.terminal.tables.option_texts`.
                pairs = (str(each).partition("=") for each in value)
                value = {key: json.loads(text) for key, _, text in pairs}
            found[option] = msgspec.convert(value, known[option])
        except (ValueError, TypeError) as error:  # or a type that msgspec does not know
            raise UserError(f"objective.{field}: {option} is {value!r:.200}: {error}") from error
    return function, found


def packages_digest(objective: Objective) -> bytes:
    """Hash of the formulas' packages, 32 bytes; empty: both built in; raises `UserError`."""
    names = [(kind, getattr(objective, name), known) for kind, (name, _, known) in FIELDS.items()]
    entries = [_entry(kind, name) for kind, name, known in names if name not in known]
    return digest("swarm/1/formulas", *map(_package_digest, entries)) if entries else b""


@lru_cache(maxsize=64)
def _loaded(kind: Kind, name: str) -> Callable[..., Any]:
    entry = _entry(kind, name)
    try:
        function: Callable[..., Any] = entry.load()
        inspect.signature(function)  # raises for what is no function, or tells no parameters
    except (Exception, SystemExit) as error:  # a package of others may do anything
        raise UserError(
            f"the {kind} {name!r} cannot be loaded: {error}; repair its package"
        ) from error
    return function


def _entry(kind: Kind, name: str) -> EntryPoint:
    installed = {entry.name: entry for entry in entry_points(group=f"swarm.{kind}s")}
    if name in installed:
        return installed[name]
    field, _, built_in = FIELDS[kind]
    known = sorted({*installed, *built_in})
    near = difflib.get_close_matches(name, known)
    words = f"near it are {', '.join(near)}" if near else f"there are {', '.join(known)}"
    raise UserError(
        f"objective.{field} is {name!r}, which is neither built in nor installed here; {words}"
    )


@lru_cache(maxsize=64)
def _keywords(function: Callable[..., Any]) -> dict[str, Any]:
    """The keyword arguments of a formula, with their types."""
    try:
        types = get_type_hints(function, include_extras=True)
    except Exception:  # of names that it imports for type checks only, or that are wrong
        types = {}
    found = inspect.signature(function).parameters.values()
    keywords = [each.name for each in found if each.kind is inspect.Parameter.KEYWORD_ONLY]
    return {name: types.get(name, Any) for name in keywords}


def _package_digest(entry: EntryPoint) -> bytes:
    """Hash of a package's name, version and files: the same for a wheel and an editable install."""
    spec = find_spec(entry.module.partition(".")[0])
    if spec is None or entry.dist is None:
        raise UserError(f"the package of {entry.name!r} is not complete; install it again")
    roots = map(Path, spec.submodule_search_locations or [str(spec.origin)])
    found = ((root.parent, path) for root in roots for path in (root, *root.rglob("*")))
    files = {
        path.relative_to(parent).as_posix().encode(): path.read_bytes()
        for parent, path in found
        if path.is_file() and "__pycache__" not in path.parts
    }
    named = f"{entry.dist.name} {entry.dist.version} {entry.value}".encode()
    return digest(
        "swarm/1/formula", named, *(part for pair in sorted(files.items()) for part in pair)
    )
