"""Environments by name: those built into Swarm, and those that other packages register."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

import msgspec

from peers.environments.base import Environment, described
from peers.environments.calculator import Calculator
from peers.environments.code import Code
from peers.environments.length import LengthOptions, LengthTargets
from peers.environments.sort_digits import SortDigits
from swarm.errors import UserError
from swarm.manifest import OptionValue
from swarm.tables import struct_from_mapping

ENTRY_POINT_GROUP = "swarm.environments"
"""Entry points of environments in other packages: `name = "module:Class"`."""

BUILT_IN: dict[str, Callable[[], Environment]] = {
    SortDigits.name: SortDigits,
    Calculator.name: Calculator,
    Code.name: Code,
}


def load(name: str, version: str, options: Mapping[str, OptionValue] | None = None) -> Environment:
    """Load an environment, either built in or registered by another package.

    Options that belong to `LengthOptions` add length targets; the rest are the environment's own.
    Raises `UserError` when no environment has that name, the installed version differs, or an
    option is invalid.
    """
    installed = entry_points(group=ENTRY_POINT_GROUP)
    if name not in BUILT_IN and name not in installed.names:
        known = sorted({*BUILT_IN, *installed.names})
        raise UserError(
            f"environment {name!r} is not installed here; known environments: {', '.join(known)}"
        )
    length_names = LengthOptions.__struct_fields__
    own = {key: value for key, value in (options or {}).items() if key not in length_names}
    of_length = {key: value for key, value in (options or {}).items() if key in length_names}
    try:
        made = BUILT_IN[name] if name in BUILT_IN else installed[name].load()
        environment: Environment = _made(made, own, f"environment {name!r}: options")
    except UserError:
        raise
    except Exception as error:  # a lab's package may do anything
        raise UserError(
            f"environment {name!r} cannot be loaded ({described(error)}); repair its package"
        ) from error
    if environment.version != version:
        raise UserError(
            f"environment {name!r} is installed in version {environment.version!r}, but the run "
            f"wants {version!r}; install that version"
        )
    if not of_length:
        return environment
    where = f"environment {name!r}: options"
    return LengthTargets(environment, struct_from_mapping(LengthOptions, of_length, where))


def _made(made: Any, options: Mapping[str, OptionValue], where: str) -> Environment:
    """Construct an environment with its own options; raises `UserError` for an unknown option."""
    kind: type[msgspec.Struct] | None = getattr(made, "Options", None)
    known = kind.__struct_fields__ if kind is not None else ()
    for name in options:
        if name not in known:
            there = ", ".join(sorted({*known, *LengthOptions.__struct_fields__}))
            raise UserError(f"{where}: unknown key {name!r}; there are: {there}")
    environment: Environment = (
        made() if kind is None else made(struct_from_mapping(kind, options, where))
    )
    return environment
