"""`swarm peer`, also `python -m swarm.peer`: start one peer of the network."""

from pathlib import Path

import typer

from swarm.terminal.exit import exits, speak
from swarm.terminal.options import Settings, Version, explained


@exits
@explained(__file__)
def peer(
    role: list[str] | None = None,
    bootstrap: list[str] | None = None,
    listen: list[str] | None = None,
    announce: list[str] | None = None,
    bulk_port: int | None = None,
    home: str | None = None,
    config: Path | None = None,
    run: str | None = None,
    invite: str | None = None,
    manifest: list[str] | None = None,
    engine: str | None = None,
    resume: bool = False,
    new_log: bool = False,
    given: Settings = None,
    verbose: bool = False,
    json_logs: bool = False,
    version: Version = False,
) -> None:
    """Start one peer of the network; Ctrl-C leaves it cleanly."""
    # Every other option is named as the setting that it gives.
    flags = {**locals()}
    del flags["config"], flags["version"], flags["given"]
    from swarm.commands.start import start
    from swarm.settings import load_settings

    start(load_settings(config, flags, given or ()))


def main() -> None:
    """Run `python -m swarm.peer`."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    app.command()(peer)
    speak(app)
