"""A peer's own dashboard: the page of `swarm dashboard`, from the node that the peer has anyway."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from swarm.errors import UserError
from swarm.events import Event
from swarm.settings import BOOTSTRAP, PeerSettings
from swarm.terminal.extras import require_extra
from swarm.transport.http.local_server import open_listener, required_keys

if TYPE_CHECKING:
    from swarm.look.alarms.board import Board
    from swarm.node.node import Node

log = logging.getLogger(__name__)

ROLES_WITH_ROLLOUTS = {"trainer", "validator"}
"""Roles whose homes hold rollouts with their verdicts."""


class PeerDashboard:
    """The page at the address of the setting `dashboard`, once the peer has found its run."""

    def __init__(self, settings: PeerSettings) -> None:
        """Listen; raises `UserError` for a wrong address, a taken port or a missing token."""
        if not set(settings.role) - {BOOTSTRAP}:
            raise UserError(
                "--dashboard shows a run, and a bootstrap peer takes part in none: use "
                "`swarm dashboard --bootstrap` instead"
            )
        require_extra("dashboard", "--dashboard")
        tokens = Path(settings.dashboard_token_file) if settings.dashboard_token_file else None
        self._tokens = required_keys(
            settings.dashboard, tokens, "--dashboard", "--dashboard-token-file"
        )
        self._home = settings.home_path if ROLES_WITH_ROLLOUTS & set(settings.role) else None
        self._listener: socket.socket = open_listener(settings.dashboard, "--dashboard")

    def close(self) -> None:
        self._listener.close()

    async def serve(self, node: Node, alarms: Board) -> None:
        """Serve from the moment that the peer takes part in a run, until cancelled.

        `alarms`: the peer's own, for the head of the page.
        """
        from swarm.look.alarms.watching import peers_page
        from swarm.look.dashboard.feed import Feed
        from swarm.look.dashboard.server import Dashboard, serve
        from swarm.look.dashboard.snapshot import Head, Snapshot
        from swarm.look.dashboard.watch import Watcher, watch
        from swarm.run.run import Run

        part_of_run = trio.Event()

        def notice(event: Event) -> None:
            if event.name == "peer.run_found":
                part_of_run.set()

        node.events.add_sink(notice)
        await part_of_run.wait()
        assert node.part is not None
        # A run of its own: what an onlooker learns must not change what the peer follows.
        watcher = Watcher(node, Run(node.part.run.manifest_envelope), home=self._home)
        head = Head(run=watcher.run.id, trainer="Asking the run's trusted peers.")
        feed = Feed(Snapshot(head))
        amend = peers_page(node.settings.alarms, node, alarms)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(watch, watcher, feed, amend)
                page = Dashboard(feed, watcher, self._tokens)
                url = await nursery.start(serve, page, self._listener)
                node.events.emit("peer.dashboard", url=url)
        except Exception:  # a defect here must not stop the peer
            log.exception("the dashboard failed")


@contextmanager
def dashboard_listening(settings: PeerSettings) -> Iterator[PeerDashboard | None]:
    """Listen inside the block if the settings say so; raises `UserError` before anything starts."""
    if not settings.dashboard:
        yield None
        return
    dashboard = PeerDashboard(settings)
    try:
        yield dashboard
    finally:
        dashboard.close()


@asynccontextmanager
async def serving_dashboard(
    dashboard: PeerDashboard | None, node: Node, alarms: Board
) -> AsyncIterator[None]:
    """Serve inside the block, if a dashboard is wanted."""
    async with trio.open_nursery() as nursery:
        if dashboard is not None:
            nursery.start_soon(dashboard.serve, node, alarms)
        yield
        nursery.cancel_scope.cancel()
