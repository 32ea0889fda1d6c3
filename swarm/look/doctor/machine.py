"""Checks of this machine alone: program, packages, home, key, ports."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from swarm.errors import UserError
from swarm.look.health import Unwell
from swarm.look.health import examine as examine_health
from swarm.roles import load_role
from swarm.run.findings import Finding, attempt
from swarm.settings import BOOTSTRAP, PeerSettings
from swarm.terminal.extras import EXTRA_OF_ROLE, require_extra
from swarm.transport.libp2p.addresses import (
    check_port_free,
    default_listen,
    host_and_port,
    parse_multiaddr,
)
from swarm.version import __version__
from swarm.wire.identity import KEY_FILE, check_home_identity, load_or_create
from swarm.world.home import check_format, existing


def program() -> Finding:
    """Swarm's version, and the Python that runs it."""
    version = platform.python_version()
    text = f"swarm {__version__} with Python {version} in {sys.prefix}"
    return Finding("program", text, {"swarm": __version__, "python": version})


def packages(role: str) -> Finding:
    """Whether there is such a role, and its packages are installed."""

    def check() -> str:
        if role in EXTRA_OF_ROLE:
            require_extra(EXTRA_OF_ROLE[role], f"--role {role}")
        if role != BOOTSTRAP:
            load_role(role)
        return f"all that role {role} needs"

    return attempt("packages", check)


# --- the home ------------------------------------------------------------------------------------


def home_and_ports(settings: PeerSettings) -> Iterator[Finding]:
    """The home, its key, and the ports of a peer that does not run yet."""
    home = settings.home_path
    broken = check_home(home)
    yield from broken
    if broken:
        return
    yield attempt("key", lambda: _key(home))
    try:
        health, _ = examine_health(home, ready=False)
    except Unwell:
        for listen in settings.listen or default_listen():
            yield attempt("port", partial(_port, listen, settings.bulk_port))
    else:
        text = f"a peer runs with {home} now: {', '.join(health.roles)}"
        yield Finding("port", text, {"peer": health.peer})


def _key(home: Path) -> str:
    check_home_identity(home)
    path = home / KEY_FILE
    if not path.exists():
        return f"none yet; the first start makes {path}"
    return f"{load_or_create(path).peer_id}, readable by this user alone"


def _port(listen: str, bulk_port: int) -> str:
    address, _ = parse_multiaddr(listen)
    host, port = host_and_port(address)
    for each in (port, bulk_port):
        check_port_free(host, each)
    free = [str(each) if each else "any" for each in (port, bulk_port)]
    return f"{host}: {free[0]} for the network and {free[1]} for pieces, free"


# --- folders -------------------------------------------------------------------------------------


def check_home(home: Path) -> list[Finding]:
    """What keeps a peer from using this folder as its home."""
    nearest = existing(home)
    if not nearest.is_dir():
        reason = f"{nearest} is a file"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        reason = f"this user may not write to {nearest}"
    else:
        try:
            check_format(home)
        except UserError as error:
            return [Finding("home", str(error), {}, problem=True)]
        return []
    text = f"{home} cannot be the home, because {reason}; choose another --home"
    return [Finding("home", text, {"reason": reason}, problem=True)]
