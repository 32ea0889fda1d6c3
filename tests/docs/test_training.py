"""`docs/training.md` lists the trainer's options as they are."""

from __future__ import annotations

import tomllib
from typing import Any, get_args, get_origin

from peers.trainer.options import PREFIX, TrainerOptions, trainer_options
from tests.docs.pages import code_blocks, section, table, text

PAGE = text("docs/training.md")


def option_rows() -> list[tuple[str, str, str]]:
    """(name, type, default) of every option."""
    return [
        (PREFIX + name, _words(field.annotation), _default(field.default))
        for name, field in TrainerOptions.model_fields.items()
    ]


def _words(annotation: Any) -> str:
    if get_origin(annotation) is list:
        return f"list of {_words(*get_args(annotation))}"
    if choices := get_args(annotation):
        return " or ".join(f"`{choice}`" for choice in choices)
    return {str: "text", bool: "bool", int: "int", float: "float"}[annotation]


def _default(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | list):
        return f"`{value}`" if value else ""
    return f"{value:g}"


def test_every_option_is_described() -> None:
    rows = table(section(PAGE, "Options"))
    assert [tuple(row[:3]) for row in rows] == option_rows()
    assert all(row[3] for row in rows)


def test_the_example_is_accepted() -> None:
    example = tomllib.loads(code_blocks(section(PAGE, "Options"), "toml")[0])
    assert trainer_options(example["options"]).alarm_action == "pause"
