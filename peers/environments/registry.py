"""Environments by name: those built into Swarm, and those that other packages register.

An environment's module is imported when a run names it, because it may need a heavy library."""

import math
from collections.abc import Callable, Collection, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import msgspec

from peers.environments.chat import Chat, ChatOptions
from peers.environments.interface import Environment, SingleTurn
from peers.environments.judges import JudgedEnvironment, JudgeOptions
from peers.environments.kept import Kept, KeptOptions
from peers.environments.length import LengthOptions, LengthTargets
from peers.environments.play import described, limited, shown
from swarm.errors import UserError
from swarm.run.allowed import ALLOWED_VARIABLE, allowed_environments
from swarm.terminal.tables import option_texts, struct_from_mapping
from swarm.wire.manifest import EnvironmentReference

ENTRY_POINT_GROUP = "swarm.environments"
"""Entry points of environments in other packages: `name = "module:Class"`."""

IMPORT_SECONDS = 40.0
"""Longest import of a package. A process that imports environments as it starts has 60 s for it;
torch takes 15 s where eight processes share two cores."""

BUILT_IN = {
    name: EntryPoint(name, f"peers.{target}", ENTRY_POINT_GROUP)
    for name, target in {
        "calculator": "environments.calculator:Calculator",
        "code": "environments.code:Code",
        "dataset": "environments.dataset:Dataset",
        "genesys": "environments.genesys:Genesys",
        "harness": "endpoint.harness.environment:Harness",
        "mcp": "agents.mcp:Mcp",
        "openenv": "agents.openenv:OpenEnv",
        "sort-digits": "environments.sort_digits:SortDigits",
        "terminal": "environments.terminal.environment:Terminal",
        "tools": "environments.tools:Tools",
        "verifiers": "environments.verifiers.environment:Verifiers",
    }.items()
}


SHARED: tuple[tuple[type[msgspec.Struct], Callable[[Environment, Any], Environment]], ...] = (
    (KeptOptions, Kept),
    (JudgeOptions, JudgedEnvironment),
    (LengthOptions, LengthTargets),
    (ChatOptions, Chat),
)
"""Options that every environment has, and the wrapper that puts them into effect: the innermost
first; no two have an option of the same name."""


def installed() -> dict[str, EntryPoint]:
    """The environments of this machine by name; a built-in one hides another of its name."""
    return {**{each.name: each for each in entry_points(group=ENTRY_POINT_GROUP)}, **BUILT_IN}


def load(name: str, version: str, options: Mapping[str, Any] | None = None) -> Environment:
    """Load an environment in the version that a run wants; raises `UserError` as `load_any`."""
    environment = load_any(name, options)
    if environment.version != version:
        raise UserError(
            f"environment {name!r} is installed in version {environment.version!r}, but the run "
            f"wants {version!r}; install that version"
        )
    return environment


def load_named(reference: EnvironmentReference, allowed: Collection[str] = ()) -> Environment:
    """Load an environment that a run's manifest names; every reader of a manifest passes here.

    Raises `UserError` as `load`, and for an environment whose options are not safe in a stranger's
    hands, unless the user of this machine allows it: by `allowed`, or for the whole process."""
    name, options = reference.name, reference.options
    if name not in {*allowed, *allowed_environments()}:
        # The own attribute: a subclass of a safe class may do anything.
        safe = vars(class_of(name)).get("safe_for_strangers") is True and "kept" not in options
        if not safe or "judge" in options:  # which no stranger may ask
            what = "grades by a judge" if safe else "could run programs or read files here"
            raise UserError(
                f"the run's environment {name!r} {what}, and a run's owner is a stranger to this "
                f'machine; if you trust the owner, write environments = ["{name}"] into this '
                f"peer's settings, or under its role, or set {ALLOWED_VARIABLE}={name}"
            )
    return load(name, reference.version, options)


def load_any(name: str, options: Mapping[str, Any] | None = None) -> Environment:
    """Load the installed version; options of `SHARED` wrap it. Raises `UserError` when no
    environment has that name, its package is broken, or an option is invalid."""
    where = f"environment {name!r}: options"
    given = option_texts(options or {})
    shared = [
        {key: given.pop(key) for key in options.__struct_fields__ if key in given}
        for options, _ in SHARED
    ]
    made = class_of(name)
    try:
        environment = _made(made, given, where)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # a lab's package may do anything
        raise _broken(name, error) from error
    seconds = environment.call_seconds
    if not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
        raise UserError(
            f"environment {name!r} has the call_seconds {shown(seconds, 40)}; it must be a number "
            "above 0"
        )
    for (kind, wrap), values in zip(SHARED, shared, strict=True):
        if values:
            environment = wrap(environment, struct_from_mapping(kind, values, where))
    return environment


def class_of(name: str) -> type[Environment]:
    """The class of an environment; raises `UserError` if it is missing or its package is broken."""
    found = installed()
    if name not in found:
        raise UserError(
            f"environment {name!r} is not installed here; known environments: "
            f"{', '.join(sorted(found))}"
        )
    try:
        with limited(
            IMPORT_SECONDS,
            lambda: (
                f"environment {name!r} took more than {IMPORT_SECONDS:g} s to import; repair its "
                "package, or make it import less"
            ),
        ):
            made = found[name].load()
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # a lab's package may do anything
        raise _broken(name, error) from error
    if not (isinstance(made, type) and issubclass(made, SingleTurn)):
        raise UserError(
            f"environment {name!r} is {made!r:.100}; it must be a subclass of SingleTurn or "
            "Episodes of peers.environments"
        )
    for field, example in (("name", "word-chain"), ("version", "1")):
        value = getattr(made, field, None)
        if not isinstance(value, str) or not value:
            raise UserError(
                f"environment {name!r}: its class has {shown(value, 40)} as its {field}; it must "
                f'be text in quotes, such as {field} = "{example}"'
            )
    options: object = made.Options
    if options is not None and not (
        isinstance(options, type) and issubclass(options, msgspec.Struct)
    ):
        raise UserError(
            f"environment {name!r}: its class has the Options {shown(options, 40)}; it must be a "
            "subclass of msgspec.Struct, or None"
        )
    return made


def _broken(name: str, error: BaseException) -> UserError:
    return UserError(
        f"environment {name!r} cannot be loaded ({described(error)}); repair its package"
    )


def _made(made: type[Environment], options: Mapping[str, Any], where: str) -> Environment:
    """Construct an environment with its own options; raises `UserError` for an unknown option."""
    kind = made.Options
    known = kind.__struct_fields__ if kind is not None else ()
    for key in options:
        if key not in known:
            shared = [name for options, _ in SHARED for name in options.__struct_fields__]
            there = ", ".join(sorted({*known, *shared}))
            raise UserError(f"{where}: unknown key {key!r}; there are: {there}")
    return made() if kind is None else made(struct_from_mapping(kind, options, where))
