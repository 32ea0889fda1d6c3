"""`swarm peer`, also `python -m swarm.peer`: start one peer of the network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swarm.terminal.exit import exits, speak
from swarm.terminal.options import Version


@exits
def peer(
    role: Annotated[list[str] | None, typer.Option(help="Role of this peer; repeatable.")] = None,
    bootstrap: Annotated[
        list[str] | None, typer.Option(help="Multiaddr of a peer that knows the network.")
    ] = None,
    listen: Annotated[list[str] | None, typer.Option(help="Multiaddr to listen on.")] = None,
    announce: Annotated[
        list[str] | None, typer.Option(help="Multiaddr to announce: a forwarded port, or a name.")
    ] = None,
    announce_bulk: Annotated[
        list[str] | None, typer.Option(help="http://host:port of the piece plane to announce.")
    ] = None,
    bulk_port: Annotated[int | None, typer.Option(help="TCP port of the piece plane.")] = None,
    uplink_mbps: Annotated[
        float | None, typer.Option(help="Upload limit for pieces, in megabits per second.")
    ] = None,
    home: Annotated[str | None, typer.Option(help="Folder of keys and state.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.")] = None,
    run: Annotated[str | None, typer.Option(help="Run to join, if there are several.")] = None,
    invite: Annotated[
        str | None, typer.Option(help="Invite of the run's owner, if the run asks for one.")
    ] = None,
    manifest: Annotated[
        list[str] | None, typer.Option(help="File with a signed run manifest.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Engine that generates: native or vllm.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Trainer: resume from its last step.")
    ] = False,
    new_log: Annotated[
        bool,
        typer.Option(
            "--new-log",
            help="Trainer, validator: begin a log without copies. Never after a lost disk.",
        ),
    ] = False,
    metrics: Annotated[
        str | None, typer.Option(help="host:port at which Prometheus reads this peer's figures.")
    ] = None,
    metrics_key_file: Annotated[
        str | None, typer.Option(help="File with the keys that scrapers send, one a line.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show every event.")] = False,
    json_logs: Annotated[bool, typer.Option("--json-logs", help="Events as JSON lines.")] = False,
    version: Version = False,
) -> None:
    """Start one peer of the network; Ctrl-C leaves it cleanly."""
    # Every option is named as the setting that it gives.
    flags = {**locals()}
    del flags["config"], flags["version"]
    from swarm.commands.start import start
    from swarm.settings import load_settings

    start(load_settings(config, flags))


def main() -> None:
    """Run `python -m swarm.peer`."""
    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command()(peer)
    speak(command)
