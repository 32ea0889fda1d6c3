"""The report of a simulation's results on a terminal, and the progress of a running one."""

import sys
import time
from typing import Any

import trio
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from simnet.simulation import Simulation
from swarm.terminal.figures import readable_bytes, readable_seconds

DIM = "bright_black"
BROADCASTS_SHOWN = 6
EVENT_LETTERS_MAX = 200
EVENTS_SHOWN = 20
UNITS = ("_bytes", "_seconds", "_minutes", "_share", "_mbps")
"""Suffixes of names that give a figure's unit."""


def print_report(report: dict[str, Any], replay: str, console: Console | None = None) -> None:
    """Print the report of `simulate`; `replay` is the command that repeats the run."""
    console = console or Console(highlight=False)
    for part in (_head(report), *_figures(report["figures"]), *_network(report["network"])):
        console.print(part)
        console.print()
    line = Text("trace hash ", style=DIM)
    line.append(report["trace_hash"])
    console.print(line, soft_wrap=True)
    for line_before in report["led_there"][-EVENTS_SHOWN:]:
        console.print(Text(line_before, style=DIM), soft_wrap=True)
    for violation in report["violations"]:
        console.print(Text(f"VIOLATION {violation}", style="bold red"), soft_wrap=True)
    if report["violations"]:
        console.print(Text(f"replay: {replay}"), soft_wrap=True)


def readable_event(entry: tuple[float, str, str, dict[str, Any]]) -> str:
    time, name, peer, fields = entry
    shown = " ".join(
        f"{key}={value.hex()[:12] if isinstance(value, bytes) else value}"
        for key, value in fields.items()
    )
    return f"{time:10.3f} s  {peer}  {name} {shown}"[:EVENT_LETTERS_MAX]


def _head(report: dict[str, Any]) -> RenderableType:
    virtual, wall = report["virtual_seconds"], report["wall_seconds"]
    title = Text(report["scenario"], style="bold cyan")
    title.append(f"  {report['peers']:,} peers, seed {report['seed']}", style="bold")
    if report["violations"]:
        count = len(report["violations"])
        title.append(f"  {count} violation{'s' if count > 1 else ''}", style="bold red")
    else:
        title.append("  nothing violated", style="bold green")
    line = Text(
        f"{readable_virtual(virtual)} of virtual time in {readable_virtual(wall)} "
        f"({readable_speed(virtual / max(wall, 1e-9))} real time), {report['events']:,} events, "
        f"{report['network']['control_messages']:,} control messages, "
        f"{report['network']['dht_lookups']:,} DHT lookups",
        style=DIM,
    )
    return Group(title, line)


def new_table(title: str | None, first: str, *numbers: str) -> Table:
    """Make a table in the style of the report: a first column, then columns of numbers."""
    table = Table(
        title=title, title_style="bold", title_justify="left", header_style=DIM,
        box=box.SIMPLE_HEAD, border_style=DIM, pad_edge=False, show_edge=False,
    )  # fmt: skip
    table.add_column(first)
    for number in numbers:
        table.add_column(number, justify="right")
    return table


def _figures(figures: dict[str, Any]) -> list[RenderableType]:
    """Make a table of single figures, a table of figures with parts, and one per list of rows."""
    single = {name: value for name, value in figures.items() if not isinstance(value, (dict, list))}
    parts = {name: value for name, value in figures.items() if isinstance(value, dict) and value}
    shown: list[RenderableType] = []
    for name, rows in figures.items():
        if isinstance(rows, list) and rows and isinstance(rows[0], dict):
            shown.append(_rows(name, rows))
    if single:
        table = Table.grid(padding=(0, 3))
        table.add_column(style=DIM, no_wrap=True)
        table.add_column(justify="right")
        for name, value in single.items():
            table.add_row(words(name), figure(name, value))
        shown.append(table)
    if parts:
        columns = list(dict.fromkeys(key for value in parts.values() for key in value))
        table = new_table(None, "", *map(words, columns))
        for name, value in parts.items():
            cells = (
                figure(_unit_of(column) or name, value[column]) if column in value else ""
                for column in columns
            )
            table.add_row(words(name), *cells)
        shown.append(table)
    return shown


def _rows(title: str, rows: list[dict[str, Any]]) -> Table:
    """Make a table of a list of similar rows; the first column gives their names and units."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = new_table(words(title), *map(words, columns))
    table.columns[0].no_wrap = True
    for row in rows:
        name = str(row[columns[0]])
        cells = (
            "–" if row.get(column) is None else figure(_unit_of(column) or name, row[column])
            for column in columns[1:]
        )
        table.add_row(words(name), *cells)
    return table


def _network(network: dict[str, Any]) -> list[RenderableType]:
    """Make tables of broadcasts, of what each role did, and of how these spent their time."""
    broadcasts = [
        {
            "policy": entry["step"],
            "published_seconds": entry["published_seconds"],
            "size_bytes": entry["bytes"],
            "complete": f"{entry['complete']} of {entry['receivers']}",
            **{f"{name}_seconds": seconds for name, seconds in entry["seconds"].items()},
        }
        for entry in network["broadcasts"]
        if entry["receivers"]
    ]
    roles: list[dict[str, Any]] = []
    times: list[dict[str, Any]] = []
    for role, entry in network["roles"].items():
        roles.append({"role": role, **entry})
        shares = roles[-1].pop("time_shares")
        if shares and role in ("trainer", "validator", "inference"):
            shown = {cause: share for cause, share in shares.items() if share >= 0.0005}
            times.append({"role": role, **{f"{cause}_share": shown[cause] for cause in shown}})
    tables = (
        ("broadcasts", broadcasts[:BROADCASTS_SHOWN]),
        ("peers", roles),
        ("how they spent their time", times),
    )
    return [_rows(title, rows) for title, rows in tables if rows]


def _unit_of(name: str) -> str | None:
    return name if name.endswith(UNITS) else None


def words(name: str) -> str:
    for unit in ("_bytes", "_seconds", "_share"):
        name = name.removesuffix(unit)
    return name.replace("_", " ")


def figure(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("_bytes"):
        return readable_bytes(int(value))
    if "seconds" in name:
        return f"{value:.3f} s" if value < 10 else f"{value:,.1f} s"
    if name.endswith("_minutes"):
        return f"{value:.1f} min"
    if name.endswith("_share"):
        return f"{value:.1%}"
    return f"{value:,}"


PASSES_BETWEEN_LOOKS = 64
"""Scheduler passes between two readings of the machine's clock: some milliseconds."""

LINE_SECONDS = 5.0


class Progress(trio.abc.Instrument):
    """Prints progress on stderr every few seconds, as a trio instrument called at scheduler passes.
    The simulation never sees the machine's clock, so its trace is the same with and without."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._passes = 0
        self._last = (time.monotonic(), 0.0)
        """(machine's time, virtual time) of the last line."""

    def after_io_wait(self, timeout: float) -> None:
        self._passes += 1
        if self._passes % PASSES_BETWEEN_LOOKS:
            return
        now, virtual = time.monotonic(), trio.current_time()
        since, virtual_since = self._last
        if now - since >= LINE_SECONDS:
            self._last = now, virtual
            speed = (virtual - virtual_since) / max(1e-9, now - since)
            simulation = self._simulation
            print(
                f"{readable_virtual(virtual)} virtual  {simulation.trace.events:,} events  "
                f"{simulation.network.messages:,} messages  {readable_speed(speed)} real time",
                file=sys.stderr,
                flush=True,
            )


def readable_virtual(seconds: float) -> str:
    """`7.3 s`, `3:07`, `2:14:09`."""
    return f"{seconds:.1f} s" if seconds < 60 else readable_seconds(seconds)


def readable_speed(speed: float) -> str:
    """`0.85 ×`, `12 ×`, `1,204 ×`."""
    return f"{speed:.2f} ×" if speed < 9.95 else f"{speed:,.0f} ×"
