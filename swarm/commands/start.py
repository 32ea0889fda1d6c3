"""The life of one peer process.

The peer makes its key on first use, joins the network through the bootstrap peer, finds the run,
is admitted, and works until Ctrl-C."""

import gc
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import closing, nullcontext, suppress

import trio

from swarm.errors import UserError
from swarm.events import Sink
from swarm.look.alarms.raising import raising
from swarm.look.health import beating
from swarm.look.metrics.server import MetricsServer
from swarm.node.joining import NO_WAY_IN
from swarm.node.local import open_node
from swarm.node.node import Departure
from swarm.roles import check_tables, load_role, take_part
from swarm.run.allowed import allow_environments
from swarm.settings import BOOTSTRAP, PeerSettings
from swarm.terminal.crash import crashes_reported
from swarm.terminal.extras import EXTRA_OF_ROLE, require_extra
from swarm.terminal.interrupt import run_until_interrupted
from swarm.terminal.screen import Earned, Screen
from swarm.terminal.untrusted import PrintableFormatter
from swarm.world.process import HOME_VARIABLE, close_memory


async def run_peer(settings: PeerSettings, departure: Departure, show: Sink | None = None) -> None:
    """Run a peer until it is cancelled, has left, or all its roles have finished.

    `show`: gets its events. By default they are lines of JSON or of text."""
    _check_roles(settings)  # first: a role without its packages cannot be loaded
    roles = [load_role(name) for name in settings.role if name != BOOTSTRAP]
    if not settings.role:
        raise UserError("no role given; use --role inference, for example")
    if roles and not settings.bootstrap and not settings.manifest:
        raise UserError(NO_WAY_IN)
    check_tables(settings)
    allow_environments(settings.allowed)
    os.environ[HOME_VARIABLE] = str(settings.home_path)
    # Most objects are those of modules, which stay. The collector counts the others alone now, so
    # it looks for cycles among them before these are megabytes.
    gc.collect()
    gc.freeze()
    with closing(MetricsServer(settings)) if settings.metrics else nullcontext() as metrics:
        async with (
            open_node(settings, show) as node,
            beating(node) as pulse,
            raising(settings.alarms, node),
            trio.open_nursery() as nursery,
        ):
            if metrics is not None:
                nursery.start_soon(metrics.serve, node, pulse)
            earned = Earned()
            node.events.add_sink(earned)
            node.departure = departure
            try:
                await take_part(node, roles)
            finally:
                if earned.submissions:
                    node.events.emit("peer.earned", **earned.totals())
            nursery.cancel_scope.cancel()


def _check_roles(settings: PeerSettings) -> None:
    """Raise `UserError` for what would end the peer later: packages, and what its roles check."""
    for role in settings.role:
        if role in EXTRA_OF_ROLE:
            require_extra(EXTRA_OF_ROLE[role], f"--role {role}")
        if role != BOOTSTRAP and (check := getattr(load_role(role), "check", None)):
            check(settings)


LEAVING = "leaving…"


class ToScreen(logging.Handler):
    """Warnings of libraries, above the lines that are drawn anew."""

    def __init__(self, screen: Screen) -> None:
        super().__init__()
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        """As logging calls it."""
        self._screen.say(self.format(record), record.created)


def become_rank(names: Sequence[str]) -> None:
    """Replace this process by its role's `rank_module` if `torchrun` gave it a rank above 0.

    Only rank 0 is a peer; the other ranks obey it. Raises `UserError`."""
    rank = os.environ.get("RANK", "0")
    if rank == "0":
        return
    module = None
    if len(names) == 1 and names[0] != BOOTSTRAP:
        module = getattr(load_role(names[0]), "rank_module", None)
    if module is None:
        raise UserError(
            f"the environment's RANK is {rank}, but role {', '.join(names)} is one process; start "
            "torchrun with --role trainer alone, and other roles without torchrun"
        )
    os.execv(sys.executable, [sys.executable, "-m", module])


def start(settings: PeerSettings) -> None:
    """Run a peer until it ends or is interrupted."""
    screen = Screen()
    handler = ToScreen(screen)
    handler.setFormatter(PrintableFormatter("%(levelname)s %(message)s"))
    logging.basicConfig(handlers=[handler])
    become_rank(settings.role)
    close_memory()
    departure = Departure()

    def ask_to_leave() -> bool:
        leaves = departure.ask()
        if leaves:
            screen.say(LEAVING)
        return leaves

    with suppress(KeyboardInterrupt), crashes_reported(settings.home_path):
        run_until_interrupted(
            run_peer,
            settings,
            departure,
            None if settings.json_logs or settings.verbose else screen,
            on_interrupt=lambda: screen.say(LEAVING),
            ask_to_leave=ask_to_leave,
        )
