"""The checks of `swarm upgrade-check`: can this build take over a home, and take part in its run?

Nothing is changed, and a peer may run with the home meanwhile. What needs the engine is left to
`swarm preflight`.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from blake3 import blake3

from peers.trainer.state_format import STATE_FILE, STATE_VERSION, STATES
from swarm import __version__
from swarm.app.archives import home_rows
from swarm.app.doctor.engine import task_of
from swarm.app.local_node import visit
from swarm.app.onlooker import status_of
from swarm.envelope import Dropped, open_envelope
from swarm.errors import SwarmError, UserError, leaf_errors
from swarm.findings import Finding
from swarm.identity import check_home_identity
from swarm.manifest import RunManifest
from swarm.messages import Present
from swarm.protocol import PROTOCOL_OLDEST, PROTOCOL_VERSION, UPGRADE
from swarm.settings import PeerSettings
from swarm.world.home import holder_of
from swarm.world.home_format import HOME_FORMAT, bytes_needed, check_format, due

CHECKPOINTS = "checkpoints"
"""Folder in a home with policies."""


async def look(settings: PeerSettings) -> list[Finding]:
    """Check this build against a home and, by `settings.bootstrap`, against its run."""
    found = [_program(), *_home(settings.home_path)]
    if settings.bootstrap:
        found += await _network(settings)
    return found


def _program() -> Finding:
    older = f", works with {PROTOCOL_OLDEST} and newer" * (PROTOCOL_OLDEST < PROTOCOL_VERSION)
    text = f"swarm {__version__}: protocol version {PROTOCOL_VERSION}{older}; format {HOME_FORMAT}"
    figures = {"swarm": __version__, "protocol": PROTOCOL_VERSION, "oldest": PROTOCOL_OLDEST}
    return Finding("program", text, {**figures, "format": HOME_FORMAT})


# --- the home ------------------------------------------------------------------------------------


def _home(home: Path) -> Iterator[Finding]:
    if not home.is_dir() or not any(home.iterdir()):
        yield Finding("home", f"{home} does not exist yet; nothing to take over", {})
        return
    if not (home / "identity.key").exists() and not any(home.glob("*.sqlite")):
        text = f"{home} has no identity.key, so no peer has used it; give the --home of the peer"
        yield Finding("home", text, {}, problem=True)
        return
    try:
        check_home_identity(home)
        yield _format(home)
        for path in sorted(home.glob("*.sqlite")):
            yield _database(path)
        yield from _manifests(home)
        yield from _states(home)
    except UserError as error:
        yield Finding("home", str(error), {}, problem=True)
    if holder := holder_of(home):
        text = f"{home} is in use by {holder}: stop that one by SIGTERM first"
        yield Finding("running", text, {"by": holder})


def _format(home: Path) -> Finding:
    found, free = check_format(home), shutil.disk_usage(home).free
    needed = bytes_needed(home, found)
    figures = {"format": found, "becomes": HOME_FORMAT, "needs_bytes": needed, "free_bytes": free}
    if found == HOME_FORMAT:
        return Finding("home", f"{home} has this build's format, {found}", figures)
    text = (
        f"{home} has format {found}; the first start migrates it to {HOME_FORMAT} "
        f"({'; '.join(each.what for each in due(found))}) by copies of at most {needed} bytes"
    )
    if free < needed:
        text += f", and the disk has {free} bytes: free some space"
    return Finding("home", text, figures, problem=free < needed)


def _database(path: Path) -> Finding:
    (answer,) = home_rows(path, "PRAGMA quick_check(1)")[0]
    size = sum(p.stat().st_size for p in path.parent.glob(f"{path.name}*") if p.is_file())
    whole = answer == "ok"
    text = f"{path.name}: {size} bytes, " + (
        "whole" if whole else f"damaged ({answer}); restore the home from a copy"
    )
    return Finding("store", text, {"name": path.name, "bytes": size}, problem=not whole)


def _manifests(home: Path) -> Iterator[Finding]:
    """Whether this build reads the manifests of the runs that the peer has joined."""
    database = home / "peer.sqlite"
    if not database.exists():
        return
    runs: dict[str, str] = {}
    for (raw,) in home_rows(database, "SELECT envelope FROM manifests ORDER BY run, version"):
        try:
            envelope = open_envelope(raw)
        except Dropped as dropped:
            text = f"a stored manifest cannot be read ({dropped}): upgrade with {UPGRADE}"
            yield Finding("manifest", text, {}, problem=True)
        else:
            manifest = envelope.expect(RunManifest)
            runs[envelope.body.run] = f"version {manifest.version}, needs {manifest.needs}"
    for run, what in runs.items():
        yield Finding("manifest", f"{run}: {what}", {"run": run})


def _states(home: Path) -> Iterator[Finding]:
    """Whether this build resumes from the trainer's states."""
    for path in sorted((home / STATES).glob(f"*/{STATE_FILE}")):
        try:
            version = json.loads(path.read_bytes())["version"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"{path} cannot be read ({error}); restore it from a copy") from error
        name, known = f"{STATES}/{path.parent.name}", version == STATE_VERSION
        text = f"{name}: version {version}" + (
            "" if known else f", and this build resumes from {STATE_VERSION}: end the run first"
        )
        yield Finding("state", text, {"version": version}, problem=not known)


# --- the run -------------------------------------------------------------------------------------


async def _network(settings: PeerSettings) -> list[Finding]:
    try:
        async with visit(settings.bootstrap, settings.run, looks_on=True) as (node, run):
            manifest = run.manifest
            text = f"{run.id} needs protocol version {manifest.needs}"
            found = [Finding("run", text, {"run": run.id, "needs": manifest.needs})]
            found += _environments(settings.home_path, manifest)
            return [*found, *_peers((await status_of(node, run)).present.values(), manifest)]
    except (SwarmError, BaseExceptionGroup) as error:
        leaves = leaf_errors(error)
        if not all(isinstance(leaf, SwarmError) for leaf in leaves):
            raise
        return [Finding("run", str(leaves[0]), {}, problem=True)]


def _environments(home: Path, manifest: RunManifest) -> Iterator[Finding]:
    """Whether this build has the run's environments, and renders their tasks as its owner did."""
    local = [each for each in manifest.environments if each.where == "local"]
    yield from map(task_of, local)
    folder = _tokenizer(home, manifest.tokenizer_hash)
    if folder is None:
        text = "not compared: the home holds no policy with the run's tokenizer"
        yield Finding("probes", text, {"compared": False})
        return
    from swarm.app.run_probe import probe_hashes

    for each in local:
        try:
            alike = probe_hashes(folder, [each]).probes[0] == each.probe_hash
        except UserError as error:
            yield Finding("probes", str(error), {}, problem=True)
            continue
        text = f"{each.name} {each.version}: " + (
            "tasks are rendered as the run's owner rendered them"
            if alike
            else "tasks are rendered differently from the run's owner; keep the older build in "
            "this run"
        )
        yield Finding("probes", text, {"rendered_alike": alike}, problem=not alike)


def _tokenizer(home: Path, digest: bytes) -> Path | None:
    """The folder of a policy in the home with this tokenizer."""
    for path in sorted((home / CHECKPOINTS).glob("*/tokenizer.json")):
        if blake3(path.read_bytes()).digest() == digest:
            return path.parent
    return None


def _peers(present: Iterable[Present], manifest: RunManifest) -> Iterator[Finding]:
    """One line per build among the run's peers; a trusted peer's that is too old is a problem."""
    builds: dict[tuple[int, str], list[Present]] = defaultdict(list)
    for each in present:
        if each.standing in ("live", "suspected"):
            builds[each.heartbeat.protocol, each.heartbeat.build].append(each)
    trusted = manifest.trusted_ids()
    for (protocol, build), peers in sorted(builds.items(), reverse=True):
        roles = sorted({role for each in peers for role in each.heartbeat.roles})
        what = f"protocol version {protocol} ({f'swarm {build}' if build else 'an older build'})"
        text = f"{len(peers)} of {sum(map(len, builds.values()))} peers speak {what}: " + (
            ", ".join(roles)
        )
        behind = [each.peer for each in peers if protocol < manifest.needs and each.peer in trusted]
        if behind:
            text += f"; the run needs {manifest.needs}, so upgrade {', '.join(behind)}"
        figures = {"protocol": protocol, "build": build, "ids": sorted(p.peer for p in peers)}
        yield Finding("peers", text, figures, problem=bool(behind))
