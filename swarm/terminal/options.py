"""Options that several commands share."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
import typer

from swarm.errors import UserError
from swarm.terminal.tables import option_texts
from swarm.version import __version__

Bootstrap = Annotated[
    list[str] | None,
    typer.Option(
        "--bootstrap",
        help="Multiaddr of a peer in the network; repeatable. Default: the "
        "addresses that a peer with the default --home last joined through.",
    ),
]
WhichRun = Annotated[
    str | None, typer.Option("--run", help="Id or name of the run, if there are several.")
]
LedgerSource = Annotated[
    Path | None,
    typer.Option(
        "--from", help="Home of a trainer or validator, or an export; default: ask the network."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
TokenizerFolder = Annotated[
    Path | None,
    typer.Option(
        help="Folder with tokenizer.json and config.json; default: the model, if it is a folder."
    ),
]


EnvironmentOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        help="Option of the environment as KEY=VALUE in TOML, such as 'lengths=[8,12]'; "
        "repeatable.",
    ),
]

Weights = Annotated[
    list[float] | None,
    typer.Option(
        "--weight",
        help="How often to draw the --data at the same position, in any unit; repeatable. Without "
        "it all data are one source.",
    ),
]


def absolute(data: str) -> str:
    """An existing path as an absolute one; an address or a name of the hub as it is."""
    return str(Path(data).absolute()) if Path(data).exists() else data


SEED_MAX = (1 << 63) - 1
"""Largest seed or step: a signed integer of 64 bits."""

TaskSeed = Annotated[
    int, typer.Option(min=0, max=SEED_MAX, help="Seed of the tasks and of the sampling.")
]


UNGRADABLE_MAX = 0.05
"""More such rows look like a wrong column."""

UngradableMax = Annotated[
    float,
    typer.Option(
        min=0,
        max=1,
        help="Largest share of rows without a usable prompt or answer, or of samples that cannot "
        "be graded.",
    ),
]


EnginesHome = Annotated[
    Path, typer.Option(help="Folder where `swarm engine install` puts engines.")
]
Temperature = Annotated[float, typer.Option(help="Sampling temperature.")]


StructT = TypeVar("StructT", bound=msgspec.Struct)


def filled(kind: type[StructT], options: Mapping[str, Any], **given: Any) -> StructT:
    """A structure with a command's options of its fields' names, except for the fields given."""
    own = options.keys() & kind.__struct_fields__
    return kind(**{name: options[name] for name in own} | given)


def check_dtype(dtype: str) -> None:
    """Raise `UserError` for a precision that no engine computes in."""
    if dtype not in ("auto", "float32", "bfloat16"):
        raise UserError(f"--dtype is {dtype!r}; it must be auto, float32 or bfloat16")


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
