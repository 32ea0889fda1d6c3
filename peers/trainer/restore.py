"""A run's published policy is put where a trainer without a training state begins with it.

The trainer looks for it in `RESTORED` in its home. Only what a trainer has signed gets there: by a
valid announcement, or by an entry in its log.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import trio

from peers.learning.state_format import STATES
from peers.trainer.saving import INHERITED, RESTORED, RESTORING
from peers.trainer.standby.following import ROOT as BUNDLE
from peers.trainer.standby.following import whole_bundle
from peers.trainer.takeover import GONE_SECONDS, ask_all_trusted, last_sign_of_life
from swarm.errors import DeadlineError, DiskFullError, PeerError, UserError
from swarm.ledger.client import LedgerClient, fetch_log
from swarm.ledger.entries import CheckpointPublished
from swarm.look.archives import learn_versions
from swarm.look.newest_policy import from_peers
from swarm.look.onlooker import RunStatus, ask_all
from swarm.node.local import last_bootstrap, visit
from swarm.node.node import Node
from swarm.run.choice import check_joined
from swarm.run.run import Run
from swarm.shardcast.manifest import MANIFEST_NAME, BadManifest, CheckpointManifest, digest_of
from swarm.shardcast.mirror.describe import own_manifest, verify
from swarm.shardcast.mirror.folder import Progress
from swarm.wire.identity import load_or_create
from swarm.world.disk import LocalDisk
from swarm.world.home import check_format, sole_user

NEW_LOG = " (and --new-log, if it has never run)"
"""The lost trainer may be one of those whom a peer without a log waits for."""

LOGS_SECONDS = 60.0
"""Deadline for reading the trainers' logs."""


@dataclass(frozen=True)
class Restore:
    """What the operator asks for."""

    home: Path
    """The home of the trainer, or of a standby that is going to take over."""
    bootstrap: Sequence[str]
    run: str | None
    policy: Path | None
    """A checkpoint folder of some peer; None: the newest policy is fetched from the run's peers."""
    deadline: float
    """Seconds before the fetch is given up."""


async def restore(wanted: Restore, progress: Progress = lambda done, total: None) -> list[str]:
    """Put the newest policy of a run into a trainer's home; return lines that say what was done.

    Raises `UserError` if this home is no trainer's or standby's, has a training state or a bundle
    of one, is in use, or if its trainer still runs somewhere.
    """
    home = wanted.home.expanduser()
    key = home / "identity.key"
    if not key.exists():
        raise UserError(f"--home {wanted.home} has no identity.key; give the trainer's home")
    peer = load_or_create(key).peer_id
    bootstrap = list(wanted.bootstrap) or last_bootstrap(wanted.home)
    with ExitStack() as stack:
        with _using(wanted.home):
            _check_stateless(wanted.home, home)
            stack.enter_context(sole_user(home, "swarm trainer restore"))
            disk = LocalDisk(home)
        async with visit(bootstrap, wanted.run, looks_on=True) as (node, run):
            await check_joined(disk, run.id, wanted.run)
            learn_versions(home, run)
            status = RunStatus(run)
            answered = await ask_all_trusted(node, status)  # they may have a newer version
            _check_place(run, peer)
            leads = run.manifest.is_trainer(peer)
            await _check_bundleless(wanted.home, disk, run, leads=leads)
            logged = await _logged(node, run) if wanted.policy is not None else set()
            if leads:
                age = await last_sign_of_life(node, status, answered, peer, asker="")
                if age is not None and age < GONE_SECONDS:
                    raise UserError(
                        f"trainer {peer} was heard {age:.0f} s ago, so it may still run elsewhere, "
                        "and two would sign the same steps under its key; stop it, and wait "
                        f"{GONE_SECONDS:g} s"
                    )
        aside = home / RESTORING
        with _using(wanted.home):
            aside.parent.mkdir(mode=0o700, exist_ok=True)
        if wanted.policy is None:
            manifest = await _fetched(aside, wanted, bootstrap, status, progress)
        else:
            manifest = await copy_verified(aside, wanted.policy, run.id, logged, progress)
        with _using(wanted.home):
            put_in_place(aside, home / RESTORED, manifest)
    lines = [f"policy {manifest.step} of run {run.id}: {manifest.total_bytes:,} bytes, verified"]
    newest = status.checkpoint
    if newest is not None and status.newest() > (manifest.lineage, manifest.step):
        lines.append(f"the run's newest is {newest.reference}: the steps since this one are lost")
    lines += [
        "lost with the training state: the optimiser's moments, and the batch in preparation",
        "" if leads else "let this standby take the trainer's place: swarm trainer takeover",
        f"start this peer: python -m swarm.peer --role trainer --home {wanted.home} "
        f"--bootstrap {bootstrap[0]} --config FILE{'' if leads else NEW_LOG}",
    ]
    return [line for line in lines if line]


@contextmanager
def _using(home: Path) -> Iterator[None]:
    """Turn the errors of a home's files into a `UserError`."""
    try:
        yield
    except OSError as error:
        where = f", {error.filename}" if error.filename else ""
        raise UserError(
            f"--home {home} cannot be used ({error.strerror}{where}); see that it is a trainer's "
            "home, and that this user may write in it"
        ) from error


def _check_stateless(named: Path, home: Path) -> None:
    """Raise `UserError` if a home has a training state, or is of a newer Swarm."""
    check_format(home)
    for root in (STATES, INHERITED):
        if (home / root).is_dir() and any(each.is_dir() for each in (home / root).iterdir()):
            raise UserError(
                f"--home {named} has a training state; start the trainer with --resume, which "
                "loses nothing"
            )


def _check_place(run: Run, peer: str) -> None:
    """Raise `UserError` unless a peer trains this run alone, or may come to."""
    if run.manifest.outer.rounds:
        raise UserError(
            f"run {run.id} has several trainers ([outer]): start this one again, and it "
            "fetches its state from the others"
        )
    if not run.manifest.is_trainer(peer) and not run.manifest.is_standby(peer):
        raise UserError(
            f"{peer} is neither a trainer nor a standby of run {run.id}; its owner must "
            "list that id in the manifest's standbys first"
        )


async def _check_bundleless(named: Path, disk: LocalDisk, run: Run, *, leads: bool) -> None:
    """Raise `UserError` if a home has a whole bundle: the trainer would begin with that."""
    with _using(named):
        held = await whole_bundle(disk, run.id)
    if held is not None:
        raise UserError(
            f"--home {named} has a bundle with the training state of step {held.step}; "
            f"{'start the trainer' if leads else 'type swarm trainer takeover'}, and it goes on "
            f"from there, or remove the folder {BUNDLE} in this home to begin with a policy"
        )


async def _logged(node: Node, run: Run) -> set[bytes]:
    """Digests of the manifests of all policies that a trainer or standby has published: those in
    its log, of which every trusted peer has a copy."""
    found: set[bytes] = set()
    owners = [*run.manifest.trainer_ids(), *run.manifest.standby_ids()]

    async def ask(client: LedgerClient) -> None:
        for owner in owners:
            with suppress(PeerError):  # it has no copy; another peer may
                records = await fetch_log(client, owner)
                found.update(
                    each.entry.manifest
                    for each in records
                    if isinstance(each.entry, CheckpointPublished)
                )

    with trio.move_on_after(LOGS_SECONDS):
        await ask_all(node, run.manifest.trusted_ids(), ask, [])
    return found


async def _fetched(
    out: Path, wanted: Restore, bootstrap: Sequence[str], status: RunStatus, progress: Progress
) -> CheckpointManifest:
    """Fetch the newest announced policy into the folder `out`; the same command resumes a fetch."""
    run = status.run.id
    shutil.rmtree(out, ignore_errors=True)  # of a command that was stopped before it moved it
    try:
        held = await from_peers(
            out,
            bootstrap,
            run=run,
            deadline=wanted.deadline,
            progress=progress,
            option="--home",
            known=status,
        )
    except DeadlineError as error:
        raise UserError(
            f"no peer of run {run} announces a policy any more, or has all of it ({error}); give a "
            "checkpoint folder of any of its peers with --policy"
        ) from error
    return held.manifest


async def copy_verified(
    out: Path, folder: Path, run: str, logged: Set[bytes], progress: Progress
) -> CheckpointManifest:
    """Copy a checkpoint folder to `out`, durably, and check the copy.

    `logged`: digests of the manifests of policies that the run's trainers have published.
    """
    try:
        found = own_manifest(folder)
    except BadManifest as error:
        raise UserError(f"--policy {folder}: {error}") from error
    except OSError as error:
        raise UserError(f"--policy {folder} cannot be read ({error.strerror})") from error
    if found is None:
        raise UserError(
            f"--policy {folder} has no manifest; give a checkpoint folder of a peer of the run, or "
            "one that swarm checkpoint fetch has made"
        )
    manifest, blob = found
    if manifest.run != run:
        raise UserError(f"--policy {folder} is a policy of run {manifest.run}, not of {run}")
    if digest_of(blob) not in logged:
        raise UserError(
            f"--policy {folder}: no log of a trainer of run {run} that a trusted peer has lists it "
            "as published; give another folder, or try again once the run's validators answer"
        )
    if _is_within(folder, out):
        raise UserError(
            f"--policy {folder} is where an interrupted restore put its copy; give the folder that "
            "it was copied from"
        )
    try:
        await _copy(folder, out, manifest, blob)
        problems = await verify(out, blob, progress)
        if problems:
            raise UserError(f"--policy {folder} is damaged: {'; '.join(problems)}")
        await LocalDisk(out.parent).sync(out.name)
    except BaseException:  # also when it is interrupted: the trainer needs the room
        shutil.rmtree(out, ignore_errors=True)
        raise
    return manifest


def _is_within(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())


async def _copy(folder: Path, out: Path, manifest: CheckpointManifest, blob: bytes) -> None:
    """Copy the files that a manifest lists, and no other: the trainer would read weights that
    nobody has signed from a file beside them."""
    try:
        shutil.rmtree(out, ignore_errors=True)
        source, copy = LocalDisk(folder), LocalDisk(out)
        if (free := copy.free_bytes()) < manifest.total_bytes:
            raise DiskFullError(
                f"--policy {folder} has {manifest.total_bytes:,} bytes, and {free:,} are free in "
                f"{out.parent}; free some space, or choose a --home on a larger disk"
            )
        for file in manifest.files:
            await copy.allocate(file.name, file.size_bytes)
        for piece in manifest.pieces:  # so that an interruption waits for one piece at most
            name = manifest.files[piece.file].name
            sink = copy.sink(name, piece.offset, piece.size_bytes)
            await source.copy(name, piece.offset, piece.size_bytes, sink)
            await sink.commit(sink.finish())
        await copy.write(MANIFEST_NAME, blob)
    except (OSError, ValueError) as error:  # `ValueError`: a file has become shorter
        raise UserError(f"--policy {folder} cannot be copied to {out} ({error})") from error


def put_in_place(aside: Path, restored: Path, manifest: CheckpointManifest) -> None:
    """Replace what an earlier call has put there; a folder that appears is complete.

    The folder `aside` is durable.
    """
    shutil.rmtree(restored, ignore_errors=True)
    restored.mkdir(parents=True)
    aside.rename(restored / f"{manifest.lineage}-{manifest.step}")
    os.sync()
