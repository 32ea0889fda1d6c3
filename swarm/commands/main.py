"""The `swarm` command. Its subcommands are found by entry points, and loaded when they are called.

Anyone can add a command: a function that typer can call, or a `typer.Typer` for a group, named in
an entry point of the group `swarm.commands`. A dot puts one into a group: `ledger.audit` is
`swarm ledger audit`."""

import ast
import importlib.util
import inspect
import re
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from swarm.errors import UserError
from swarm.terminal.crash import foreign_package
from swarm.terminal.exit import exit_with, exits, speak
from swarm.terminal.options import Version

GROUP = "swarm.commands"

HEADS = {
    "Run a peer": "peer join doctor id health",
    "Look at a run": "status ledger why trace rollouts dashboard",
    "Own a run": "run trainer",
    "Models and data": "train sft dpo eval synthesize dataset checkpoint endpoint",
    "Try and develop": "demo environment engine backend",
}
"""Heads of the help, each with its commands in order; those of other packages follow."""
OTHERS = "Of other packages"

FIRST_LINES = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8")
"""What `swarm` alone shows."""


class Deferred(TyperCommand):
    """A command that is imported when it is called or its own help is asked for.

    `inner` are the entry points of commands inside it, by their names in it."""

    def __init__(self, name: str, entry: EntryPoint, inner: dict[str, EntryPoint]) -> None:
        self.entry, self.inner = entry, inner
        super().__init__(name)

    def get_short_help_str(self, limit: int = 0) -> str:
        """As click calls it: the first paragraph, which click would cut to a line."""
        return summary(self.entry).partition("\n\n")[0]

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """As typer calls it: from here on the command itself is at work."""
        return self.loaded().make_context(*args, **kwargs)

    def loaded(self) -> Any:
        """The command itself."""
        try:
            found = self.entry.load()
            if not callable(found):  # a `Typer` is, too
                raise TypeError(f"{self.entry.value} is no function")
        except (ImportError, AttributeError, TypeError) as error:
            package = self.entry.dist.name if self.entry.dist else "an unknown package"
            mistake = UserError(f"the command {self.name} of {package} cannot be loaded: {error}")
            raise typer.Exit(exit_with(mistake)) from error
        if not isinstance(found, typer.Typer):
            single = typer.Typer(add_completion=False, rich_markup_mode=None)
            single.command(self.name)(exits(found))  # so that anybody's mistake is a sentence
            return typer.main.get_command(single)
        found.rich_markup_mode = None
        group = typer.main.get_group(found)
        for command in group.commands.values():
            command.short_help = (command.help or "").partition("\n\n")[0]
        for name, entry in self.inner.items():
            group.add_command(Deferred(name, entry, {}))
        return group


class Commands(TyperGroup):
    """The group of all installed commands; loads none of them by itself."""

    def invoke(self, ctx: Any) -> Any:
        """As typer calls it; a fault of another package says below its traceback whose it is."""
        try:
            return super().invoke(ctx)
        except typer.Exit:
            raise
        except Exception as error:
            if package := foreign_package(error):
                error.add_note(f"a fault of the package {package}, not of Swarm: tell its makers")
            raise

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        found = {entry.name: entry for entry in sorted(entry_points(group=GROUP))}
        for name, entry in found.items():
            if "." not in name:
                within = f"{name}."
                inner = {
                    each.removeprefix(within): value
                    for each, value in found.items()
                    if each.startswith(within)
                }
                self.add_command(Deferred(name, entry, inner))

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """As click calls it: the commands under their heads."""
        ours = " ".join(HEADS.values()).split()
        others = " ".join(name for name in self.commands if name not in ours)
        width = max(map(len, self.commands))  # for the texts of all heads to begin in one column
        for head, names in {**HEADS, OTHERS: others}.items():
            shown = [self.commands[name] for name in names.split() if name in self.commands]
            if shown:
                with formatter.section(head):
                    rows = [(f"{each.name:{width}}", each.get_short_help_str()) for each in shown]
                    formatter.write_dl(rows)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """As click calls it; completion looks into the command itself."""
        found = super().get_command(ctx, cmd_name)
        return found.loaded() if ctx.resilient_parsing and isinstance(found, Deferred) else found


def summary(entry: EntryPoint) -> str:
    """What a command is for, read from its file without importing it.

    The docstring of its function; for a group, the first sentence of its module, after a colon."""
    if entry.pattern.match(entry.value) is None:
        return f"cannot be loaded: {entry.value} names no module"
    top, *rest = entry.module.split(".")
    found = importlib.util.find_spec(top)
    name = top
    for part in rest:
        name = f"{name}.{part}"
        found = PathFinder.find_spec(name, found.submodule_search_locations) if found else None
    if found is None or found.origin is None:
        return f"cannot be loaded: there is no module {entry.module}"
    try:
        source = Path(found.origin).read_text(encoding="utf-8")
        if (docstring := _docstring_in(source, entry.attr)) is not None:
            return docstring
        if f"\ndef {entry.attr}(" not in source and (alone := re.match(r'"""[^"\\]*"""', source)):
            source = alone[0]  # a group's module, of which the docstring alone counts
        tree = ast.parse(source)
    except (OSError, SyntaxError, ValueError) as error:
        return f"cannot be loaded: {error}"
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == entry.attr:
            return ast.get_docstring(node) or ""
    told = (ast.get_docstring(tree) or "").partition("\n\n")[0].rpartition("`: ")[2]
    return told[:1].upper() + told[1:]


def _docstring_in(source: str, name: str) -> str | None:
    """A function's docstring if it is written as usual. Parsing all commands' files instead takes
    an eighth of the time of `swarm -h`."""
    head = rf'^def {re.escape(name)}\(.*\n(?:(?:    .*|\).*)\n)*?    """([^"\\]*)"""'
    found = re.search(head, source, re.M)
    return inspect.cleandoc(found[1]) if found is not None else None


app = typer.Typer(
    name="swarm",
    cls=Commands,
    rich_markup_mode=None,  # rich, which would draw boxes, takes longer to import than all else
    help="Reinforcement learning of language models across machines that do not trust each other.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def _swarm(context: typer.Context, version: Version = False) -> None:
    if context.invoked_subcommand is None:
        print(FIRST_LINES, end="")


def main() -> None:
    """The console script `swarm`."""
    speak(app)


if __name__ == "__main__":  # `torchrun -m swarm.commands.main train …`
    main()
