"""`python -m swarm.peer`: one peer of the network, with one or more roles.

    python -m swarm.peer --role inference --bootstrap /ip4/203.0.113.5/tcp/4001/p2p/12D3Koo…

It makes its key on first use, joins the network through the bootstrap peer, finds the run, is
admitted, and works until Ctrl-C.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from swarm.errors import SwarmError, UserError, leaf_errors, user_error_in
from swarm.events import Event, Events, JsonLines, Lines
from swarm.identity import load_or_create
from swarm.interrupt import run_until_interrupted
from swarm.node.assemble import assemble
from swarm.node.joining import NO_WAY_IN
from swarm.node.node import Node
from swarm.output import Version
from swarm.roles import BOOTSTRAP, load_role, take_part
from swarm.run.manifest import load_manifest, run_id
from swarm.settings import PeerSettings, load_settings
from swarm.transport.libp2p import open_libp2p, parse_multiaddr, require_peer
from swarm.untrusted import PrintableFormatter, printable_lines
from swarm.world.compute import LocalCompute
from swarm.world.disk import LocalDisk
from swarm.world.home import make_home, sole_user
from swarm.world.machine import Machine

_MACHINE_ERRORS = frozenset(
    {
        errno.EACCES,
        errno.EDQUOT,
        errno.EIO,
        errno.EMFILE,
        errno.ENFILE,
        errno.ENOMEM,
        errno.ENOSPC,
        errno.EPERM,
        errno.EROFS,
    }
)


@asynccontextmanager
async def open_node(settings: PeerSettings, events_sink: Any = None) -> AsyncIterator[Node]:
    """A node on the real network, from settings; raises `UserError` before anything is started
    where a setting is wrong."""
    for address in settings.bootstrap:
        require_peer(address)
    for address in settings.listen:
        parse_multiaddr(address)
    home = settings.home_path
    with _used_home(home, settings.role):
        async with _node_at(home, settings, events_sink) as node:
            yield node


@asynccontextmanager
async def _node_at(home: Path, settings: PeerSettings, events_sink: Any) -> AsyncIterator[Node]:
    identity = load_or_create(home / "identity.key")
    world = Machine()
    events = Events(world, identity.peer_id)
    events.add_sink(
        events_sink or (JsonLines() if settings.json_logs else Lines(verbose=settings.verbose))
    )
    disk = LocalDisk(home, settings.quota_bytes)
    manifests = {run_id(m): m for m in (load_manifest(Path(f)) for f in settings.manifest)}
    async with (
        open_libp2p(
            identity,
            listen=settings.listen,
            bulk_port=settings.bulk_port,
            uplink_bytes_per_second=settings.uplink_mbps and settings.uplink_mbps * 1e6 / 8,
            world=world,
            disk=disk,
            events=events,
            relay="relay" in settings.role or BOOTSTRAP in settings.role,
        ) as transport,
        assemble(
            identity,
            world=world,
            disk=disk,
            compute=LocalCompute(events=events),
            transport=transport,
            events=events,
            settings=settings,
            manifests=manifests,
        ) as node,
    ):
        yield node


@contextmanager
def _used_home(home: Path, roles: Sequence[str]) -> Iterator[None]:
    """The home made and locked; raises `UserError`."""
    with ExitStack() as stack:
        try:
            make_home(home)
            stack.enter_context(sole_user(home, ", ".join(roles)))
        except OSError as error:
            raise UserError(
                f"--home {home} cannot be used ({error.strerror}); choose another folder"
            ) from error
        yield


class Earned:
    """A sink that adds up what the receipts of this process say."""

    def __init__(self) -> None:
        self.submissions = Counter[str]()
        self._groups = 0
        self._completions = 0

    def __call__(self, event: Event) -> None:
        if event.name == "inference.receipt":
            self.submissions[event.fields["outcome"]] += 1
            self._groups += event.fields["groups"]
            self._completions += event.fields["completions"]

    def told(self) -> dict[str, int]:
        """Submissions by outcome; groups and completions that are credited."""
        outcomes = {name: self.submissions[name] for name in ("accepted", "refused", "quarantined")}
        return {**outcomes, "groups": self._groups, "completions": self._completions}


async def run_peer(settings: PeerSettings) -> None:
    """Be a peer until cancelled, or until every role's work is over."""
    roles = [load_role(name) for name in settings.role if name != BOOTSTRAP]
    if not settings.role:
        raise UserError("no role given; use --role inference, for example")
    if roles and not settings.bootstrap and not settings.manifest:
        raise UserError(NO_WAY_IN)
    async with open_node(settings) as node:
        earned = Earned()
        node.events.add_sink(earned)
        try:
            await take_part(node, roles)
        finally:
            if earned.submissions:
                node.events.emit("peer.earned", **earned.told())


def exit_with(error: BaseException) -> int:
    """Print what went wrong for the person at the terminal; the exit status to use."""
    mistake = user_error_in(error)
    if mistake is not None:
        print(f"error: {printable_lines(str(mistake))}", file=sys.stderr)
        return 2
    leaves = leaf_errors(error)
    if all(isinstance(leaf, SwarmError) or _is_of_the_machine(leaf) for leaf in leaves):
        told = "; ".join(_told(leaf) for leaf in leaves)
        print(f"error: {printable_lines(told)}", file=sys.stderr)
        return 1
    raise error


def _is_of_the_machine(error: BaseException) -> bool:
    """Whether the machine lacks something, rather than this program."""
    return isinstance(error, OSError) and error.errno in _MACHINE_ERRORS


def _told(error: BaseException) -> str:
    if not isinstance(error, OSError):
        return str(error)
    where = f" ({error.filename})" if error.filename else ""
    return f"this machine refuses: {error.strerror}{where}"


def become_rank(names: Sequence[str]) -> None:
    """Under `torchrun`, ranks above 0 are no peers: one becomes its role's `rank_module`, which
    takes its orders from rank 0, and never returns from here. Raises `UserError`.
    """
    rank = os.environ.get("RANK", "0")
    if rank == "0":
        return
    modules = [module for name in names if (module := _rank_module(name))]
    if len(names) != 1 or len(modules) != 1:
        raise UserError(
            f"the environment's RANK is {rank}, but role {', '.join(names)} is one process; start "
            "torchrun with --role trainer alone, and other roles without torchrun"
        )
    os.execv(sys.executable, [sys.executable, "-m", modules[0]])


def _rank_module(name: str) -> str | None:
    return None if name == BOOTSTRAP else getattr(load_role(name), "rank_module", None)


def start(settings: PeerSettings) -> int:
    """Run a peer to its end; returns the exit status."""
    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(handlers=[handler])
    try:
        become_rank(settings.role)
        run_until_interrupted(
            run_peer,
            settings,
            on_interrupt=lambda: print("leaving…", file=sys.stderr, flush=True),
        )
    except KeyboardInterrupt:
        return 0
    except (SwarmError, OSError, BaseExceptionGroup) as error:
        return exit_with(error)
    return 0


def peer(
    role: Annotated[list[str] | None, typer.Option(help="What this peer does; repeatable.")] = None,
    bootstrap: Annotated[
        list[str] | None, typer.Option(help="Multiaddr of a peer that knows the network.")
    ] = None,
    listen: Annotated[list[str] | None, typer.Option(help="Multiaddr to listen on.")] = None,
    bulk_port: Annotated[int | None, typer.Option(help="TCP port of the piece plane.")] = None,
    uplink_mbps: Annotated[
        float | None, typer.Option(help="Most that pieces may be sent at, in megabits a second.")
    ] = None,
    home: Annotated[str | None, typer.Option(help="Folder of keys and state.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with settings.")] = None,
    run: Annotated[str | None, typer.Option(help="Which run, if there are several.")] = None,
    manifest: Annotated[
        list[str] | None, typer.Option(help="File with a signed run manifest.")
    ] = None,
    engine: Annotated[str | None, typer.Option(help="native or vllm.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Trainer: go on where it was.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show every event.")] = False,
    json_logs: Annotated[bool, typer.Option("--json-logs", help="Events as JSON lines.")] = False,
    version: Version = False,
) -> None:
    """Start one peer of the network; Ctrl-C leaves it cleanly."""
    try:
        settings = load_settings(
            config,
            {
                "role": role,
                "bootstrap": bootstrap,
                "listen": listen,
                "bulk_port": bulk_port,
                "uplink_mbps": uplink_mbps,
                "home": home,
                "run": run,
                "manifest": manifest,
                "engine": engine,
                "resume": resume,
                "verbose": verbose,
                "json_logs": json_logs,
            },
        )
    except UserError as error:
        raise typer.Exit(exit_with(error)) from error
    raise typer.Exit(start(settings))


if __name__ == "__main__":
    command = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    command.command()(peer)
    command()

__all__ = ["Event", "open_node", "peer", "run_peer", "start"]
