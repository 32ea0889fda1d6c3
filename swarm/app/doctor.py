"""The checks of `swarm doctor`: what would keep a peer with these settings from working here.

Every check is a line, and one that fails says what to type. `swarm preflight` looks further at one
role, inference: it starts the engine.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from peers.inference.preflight import Finding
from peers.sandbox import probe
from swarm import __version__
from swarm.app.extras import EXTRA_OF_ROLE, require_extra
from swarm.app.health import Unwell
from swarm.app.health import examine as examine_health
from swarm.app.local_node import visit
from swarm.app.onlooker import status_of
from swarm.app.preflight import check_home, existing
from swarm.errors import SwarmError, leaf_errors
from swarm.identity import load_or_create
from swarm.manifest import EnvironmentReference
from swarm.run.run import Run
from swarm.settings import PeerSettings
from swarm.transport.libp2p.addresses import check_port_free, host_and_port, parse_multiaddr

WRITTEN_BYTES = 16 << 20
"""Bytes written to measure the disk."""

SLOW_BYTES_PER_SECOND = 20e6
"""A disk below this speed does not keep up with a line of 200 Mbit/s."""

CLOCK_UNSYNCHRONISED = 5
"""What `adjtimex` returns while nothing sets the kernel's clock."""


async def look(settings: PeerSettings) -> list[Finding]:
    """Check this machine for a peer with these settings and, by `settings.bootstrap`, its run."""
    found = [_program(), *map(_packages, settings.role), *_home(settings)]
    found += [_clock(), _sandbox()]
    if settings.bootstrap:
        found += await _network(settings)
    return found


def _attempt(topic: str, attempt: Callable[[], str]) -> Finding:
    """The line of a check that returns its result, or raises an error with the remedy."""
    try:
        return Finding(topic, attempt(), {})
    except SwarmError as error:
        return Finding(topic, str(error), {}, problem=True)


def _program() -> Finding:
    version = platform.python_version()
    text = f"swarm {__version__} with Python {version} in {sys.prefix}"
    return Finding("program", text, {"swarm": __version__, "python": version})


def _packages(role: str) -> Finding:
    def check() -> str:
        if role in EXTRA_OF_ROLE:
            require_extra(EXTRA_OF_ROLE[role], f"--role {role}")
        return f"all that role {role} needs"

    return _attempt("packages", check)


# --- the home ------------------------------------------------------------------------------------


def _home(settings: PeerSettings) -> Iterator[Finding]:
    home = settings.home_path
    broken = check_home(home)
    yield from broken
    if broken:
        return
    yield _attempt("key", lambda: _key(home))
    yield _disk(home)
    try:
        health, _ = examine_health(home, ready=False)
    except Unwell:
        for listen in settings.listen:
            yield _attempt("port", partial(_port, listen, settings.bulk_port))
    else:
        text = f"a peer runs with {home} now: {', '.join(health.roles)}"
        yield Finding("port", text, {"peer": health.peer})


def _key(home: Path) -> str:
    path = home / "identity.key"
    if not path.exists():
        return f"none yet; the first start makes {path}"
    return f"{load_or_create(path).peer_id}, readable by this user alone"


def _disk(home: Path) -> Finding:
    """Write to the disk of the home, with the wait until the bytes are durable."""
    folder = existing(home)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            began = time.perf_counter()
            file.write(os.urandom(WRITTEN_BYTES))
            file.flush()
            os.fsync(file.fileno())
            speed = WRITTEN_BYTES / (time.perf_counter() - began)
    except OSError as error:
        text = f"{folder} takes no {WRITTEN_BYTES >> 20} MiB ({error.strerror}); free some space"
        return Finding("disk", text, {}, problem=True)
    text = f"{speed / 1e6:,.0f} MB/s to durable storage in {folder}"
    if speed < SLOW_BYTES_PER_SECOND:  # perhaps only now, so it is no problem that ends a peer
        text += f"; below {SLOW_BYTES_PER_SECOND / 1e6:.0f} choose a faster disk with --home"
    return Finding("disk", text, {"bytes_per_second": round(speed)})


def _port(listen: str, bulk_port: int) -> str:
    address, _ = parse_multiaddr(listen)
    host, port = host_and_port(address)
    for each in (port, bulk_port):
        check_port_free(host, each)
    free = [str(each) if each else "any" for each in (port, bulk_port)]
    return f"{host}: {free[0]} for the network and {free[1]} for pieces, free"


# --- the machine ---------------------------------------------------------------------------------


def _clock() -> Finding:
    """Whether something sets the clock. Peers correct a wrong one, so it is no problem."""
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(256))  # all zero: only reads
    synchronised = 0 <= state != CLOCK_UNSYNCHRONISED
    text = "set by a time service"
    if not synchronised:
        text = "no time service seems to set it; type: sudo timedatectl set-ntp true"
    return Finding("clock", text, {"synchronised": synchronised})


def _sandbox() -> Finding:
    report = probe()
    if report.works:
        text = f"programs of a model run by {report.works[0]}"
    else:
        why = "; ".join(f"{means}: {reason}" for means, reason in report.reasons.items())
        text = f"none, which only environments with programs need ({why})"
    return Finding("sandbox", text, {"works": list(report.works)})


# --- the run -------------------------------------------------------------------------------------


async def _network(settings: PeerSettings) -> list[Finding]:
    found: list[Finding] = []
    began = time.perf_counter()
    try:
        async with visit(settings.bootstrap, settings.run, looks_on=True) as (node, run):
            seconds = time.perf_counter() - began
            text = f"found the run {run.id} in {seconds:.1f} s"
            found.append(Finding("network", text, {"run": run.id, "seconds": round(seconds, 1)}))
            found += _environments(settings, run)
            status = await status_of(node, run)
            count = len(status.present)
            text = f"its trusted peers answer, and know {count} peers"
            found.append(Finding("trusted", text, {"peers": count}))
    except (SwarmError, BaseExceptionGroup) as error:
        leaves = leaf_errors(error)
        if not all(isinstance(leaf, SwarmError) for leaf in leaves):
            raise
        topic = "trusted" if found else "network"
        found.append(Finding(topic, str(leaves[0]), {}, problem=True))
    return found


def _environments(settings: PeerSettings, run: Run) -> list[Finding]:
    """Whether the run's environments are here; a served one is only on environment peers."""
    if not {"inference", "validator"} & set(settings.role):
        return []
    return [task_of(each) for each in run.manifest.environments if each.where == "local"]


def task_of(wanted: EnvironmentReference) -> Finding:
    """Whether an environment is installed in the version that a run wants."""

    def check() -> str:
        require_extra("infer", "rendering the run's tasks")
        from peers.environments import load

        load(wanted.name, wanted.version, wanted.options)
        return f"{wanted.name} {wanted.version} is installed, as the run wants it"

    return _attempt("tasks", check)
