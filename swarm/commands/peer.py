"""`swarm peer`, also `python -m swarm.peer`: start one peer of the network."""

from pathlib import Path
from typing import Annotated

import typer

from swarm.terminal.exit import exits, speak
from swarm.terminal.options import Version

# What `swarm doctor` takes, too.
Roles = Annotated[list[str] | None, typer.Option(help="Role of the peer; repeatable.")]
Entries = Annotated[
    list[str] | None, typer.Option(help="Multiaddr of a peer that knows the network.")
]
Listen = Annotated[list[str] | None, typer.Option(help="Multiaddr to listen on.")]
BulkPort = Annotated[int | None, typer.Option(help="TCP port of the piece plane.")]
Home = Annotated[str | None, typer.Option(help="Folder of keys and state.")]
Config = Annotated[Path | None, typer.Option(help="TOML file with settings.")]
Engine = Annotated[str | None, typer.Option(help="Engine that generates: native or vllm.")]


@exits
def peer(
    role: Roles = None,
    bootstrap: Entries = None,
    listen: Listen = None,
    announce: Annotated[
        list[str] | None, typer.Option(help="Multiaddr to announce: a forwarded port, or a name.")
    ] = None,
    announce_bulk: Annotated[
        list[str] | None, typer.Option(help="http://host:port of the piece plane to announce.")
    ] = None,
    bulk_port: BulkPort = None,
    uplink_mbps: Annotated[
        float | None, typer.Option(help="Upload limit for pieces, in megabits per second.")
    ] = None,
    home: Home = None,
    config: Config = None,
    run: Annotated[str | None, typer.Option(help="Run to join, if there are several.")] = None,
    invite: Annotated[
        str | None, typer.Option(help="Invite of the run's owner, if the run asks for one.")
    ] = None,
    manifest: Annotated[
        list[str] | None, typer.Option(help="File with a signed run manifest.")
    ] = None,
    engine: Engine = None,
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
