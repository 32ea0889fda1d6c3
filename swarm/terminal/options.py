"""Options that several commands share."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar, cast, get_origin, get_type_hints

import msgspec
import typer

from swarm.data import beside
from swarm.errors import UserError
from swarm.terminal.tables import option_texts
from swarm.version import __version__

P = ParamSpec("P")
T = TypeVar("T")


class _Words(msgspec.Struct, forbid_unknown_fields=True):
    """What a command's file of words says of an option beside its type and default."""

    help: str
    names: list[str] = []
    """Its names, if others than the parameter's."""
    metavar: str | None = None
    min: int | float | None = None
    max: int | float | None = None
    argument: bool = False
    """Whether it is given by its position."""


def explained(module: str, **words: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Take the help, names and bounds of a command's options from the TOML file beside its module.

    A table with the function's name, and one `all` for every function of the module, give them by
    parameter, as a text or a table. `words` replace their names in braces. Parameters with an
    annotation of typer's have none there."""
    tables = beside(module, dict[str, dict[str, str | _Words]])

    def explain(command: Callable[P, T]) -> Callable[P, T]:
        rows = {**tables.get("all", {}), **tables.get(command.__name__, {})}
        for name, kind in get_type_hints(command, include_extras=True).items():
            if (row := rows.get(name)) is not None and get_origin(kind) is not Annotated:
                option = _option(name, kind, row, words)
                command.__annotations__[name] = cast(Any, Annotated)[kind, option]
        return command

    return explain


def _option(name: str, kind: Any, row: str | _Words, words: dict[str, str]) -> Any:
    given = _Words(row) if isinstance(row, str) else row
    text = given.help.format(**words) if words else given.help
    if given.argument:
        return typer.Argument(help=text, metavar=given.metavar)
    flag = [f"--{name.replace('_', '-')}"] if kind is bool else []  # without its --no- twin
    return typer.Option(
        *(given.names or flag), help=text, metavar=given.metavar, min=given.min, max=given.max
    )


_SHARED = {
    name: _option(name, None, words, {})
    for name, words in beside(__file__, dict[str, str | _Words]).items()
}

Bootstrap = Annotated[list[str] | None, _SHARED["bootstrap"]]
WhichRun = Annotated[str | None, _SHARED["run"]]
LedgerSource = Annotated[Path | None, _SHARED["ledger"]]
VerdictSource = Annotated[Path | None, _SHARED["verdicts"]]
AsJson = Annotated[bool, _SHARED["json"]]
TokenizerFolder = Annotated[Path | None, _SHARED["tokenizer"]]
Environments = Annotated[list[str] | None, _SHARED["environment"]]
RunFile = Annotated[Path | None, _SHARED["run_file"]]
EnvironmentOptions = Annotated[list[str] | None, _SHARED["option"]]
Weights = Annotated[list[float] | None, _SHARED["weight"]]
TaskSeed = Annotated[int, _SHARED["seed"]]
UngradableMax = Annotated[float, _SHARED["ungradable_max"]]
Home = Annotated[Path, _SHARED["home"]]
Settings = Annotated[list[str] | None, _SHARED["settings"]]
ComputeSettings = Annotated[list[str] | None, _SHARED["compute"]]
Temperature = Annotated[float, _SHARED["temperature"]]

UNGRADABLE_MAX = 0.05
"""More such rows look like a wrong column."""


def absolute(data: str) -> str:
    """An existing path as an absolute one; an address or a name of the hub as it is."""
    return str(Path(data).absolute()) if Path(data).exists() else data


StructT = TypeVar("StructT", bound=msgspec.Struct)


def filled(kind: type[StructT], options: Mapping[str, Any], **given: Any) -> StructT:
    """A structure with a command's options of its fields' names, except for the fields given."""
    own = options.keys() & kind.__struct_fields__
    return kind(**{name: options[name] for name in own} | given)


def check_temperature(value: float) -> None:
    """Raise `UserError` for a `Temperature` at which nothing can be sampled."""
    if not 0 < value <= 10:
        raise UserError(f"--temperature is {value:g}; it must be above 0, and at most 10")


def environment_options(lines: Sequence[str] | None) -> dict[str, Any]:
    """Parse options of an environment, each a line of TOML; raises `UserError`."""
    return option_texts(toml_lines(lines, "--option", "lengths=[8,12]"))


def toml_lines(lines: Sequence[str] | None, option: str, example: str) -> dict[str, Any]:
    """The values of an option that takes lines of TOML; raises `UserError`."""
    found: dict[str, Any] = {}
    for line in lines or ():
        try:
            found |= tomllib.loads(line)
        except tomllib.TOMLDecodeError as error:
            raise UserError(
                f"{option} is {line!r}; write it as KEY=VALUE in TOML, with text in quotes, for "
                f"example {example!r}"
            ) from error
        except ValueError as error:  # Python reads no integer of more than 4,300 digits
            raise UserError(f"{option} is {line[:60]!r}…; give a smaller number") from error
    try:
        msgspec.msgpack.encode(found)
    except OverflowError as error:
        raise UserError(f"{option} has an integer beyond 64 bits; give a smaller one") from error
    return found


def _say_version(wanted: bool) -> None:
    if wanted:
        print(f"swarm {__version__}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version.")
]
"""An option of every command line."""
