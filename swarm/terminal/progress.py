"""Progress bars on standard error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

Report = Callable[[int, int | None], None]
"""Called with what is done and what there is in all, if that is known."""


@contextmanager
def progress_bar(what: str, *, counted: bool = False) -> Iterator[Report]:
    """Show the progress of a transfer in bytes, or of something counted, on a terminal."""
    columns = [MofNCompleteColumn()] if counted else [DownloadColumn(), TransferSpeedColumn()]
    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *columns,
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    ) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
