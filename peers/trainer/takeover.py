"""A standby takes a trainer's place: it signs the version of the run that says so."""

import time
from collections.abc import Sequence
from pathlib import Path

import trio

from swarm.errors import UserError
from swarm.ledger.client import LedgerClient
from swarm.look.archives import learn_versions
from swarm.look.onlooker import STATUS_SECONDS_MAX, RunStatus, ask_all
from swarm.node.local import last_bootstrap, visit
from swarm.node.node import Node
from swarm.run.choice import check_joined
from swarm.run.manifest import manifest_in
from swarm.run.run import Run
from swarm.run.update import hand_over, sign_takeover
from swarm.sentences import numbered
from swarm.wire.identity import load_or_create
from swarm.world.disk import LocalDisk

GONE_SECONDS = 60.0
"""A trainer that no trusted peer has heard for this long is gone: six heartbeats."""


async def take_over(
    home: Path, bootstrap: Sequence[str], named: str | None, replaced: str | None, force: bool
) -> None:
    """Sign a takeover and hand it to every peer that can be reached; print what was done.

    `home` is the standby's. `named`: the run; `replaced`: the trainer whose place is taken, None:
    the first one. `force`: do not check that it is gone.

    Raises `UserError` unless the trainer is gone, and `SwarmError` if no peer takes it."""
    standby = load_or_create(home / "identity.key")
    bootstrap = list(bootstrap) or last_bootstrap(home)
    async with visit(bootstrap, named, looks_on=True) as (node, run):
        await check_joined(LocalDisk(home), run.id, named)
        learn_versions(home, run)
        status = RunStatus(run)
        answered = await ask_all_trusted(node, status)
        trainer = _trainer(run, standby.peer_id, replaced)
        if not force:
            check_gone(status, answered, trainer, standby.peer_id)
        envelope = sign_takeover(standby, run.manifest_envelope, trainer, time.time())
        refused = run.refusal(standby.peer_id, manifest_in(envelope))
        if refused is not None:
            raise UserError(f"{refused}; the run's owner must sign a new version first")
        # Those trusted peers that have answered are connected.
        trusted = [f"/p2p/{each}" for each in run.manifest.trusted_ids()]
        taken = await hand_over(node.transport, [*node.bootstrap, *trusted], envelope)
    print(f"run {run.id}: version {run.manifest.version} → {run.manifest.version + 1}")
    print(f"trainer {trainer} → {standby.peer_id}; the trainer before is a standby now")
    print(numbered(f"{len(taken)} peers have it, and tell all others"))
    shown = status.present.get(standby.peer_id)
    if shown is None:
        print(
            "start this peer: swarm peer --role trainer --home "
            f"{home} --bootstrap {bootstrap[0]} --config FILE"
        )
    else:
        print(f"this peer was {shown.heartbeat.doing}; it goes on from there")


async def ask_all_trusted(node: Node, status: RunStatus) -> list[str]:
    """Ask all trusted peers for the run's status; return those that answered."""
    answered: list[str] = []

    async def ask(client: LedgerClient) -> None:
        status.learn(await client.status())
        answered.append(client.peer)

    with trio.move_on_after(STATUS_SECONDS_MAX):
        await ask_all(node, status.run.manifest.trusted_ids(), ask, [])
    return answered


def _trainer(run: Run, standby: str, named: str | None) -> str:
    manifest = run.manifest
    if manifest.is_trainer(standby):
        raise UserError(f"{standby} is a trainer of run {run.id} already; start it")
    if not manifest.is_standby(standby):
        raise UserError(
            f"{standby} is no standby of run {run.id}; its owner must list that id in the "
            "manifest's standbys first"
        )
    trainer = named or manifest.trainer_ids()[0]
    if not manifest.is_trainer(trainer):
        raise UserError(f"--trainer {trainer} is no trainer of run {run.id}")
    return trainer


def check_gone(status: RunStatus, answered: Sequence[str], trainer: str, asker: str) -> None:
    """Raise `UserError` unless a trusted peer (`answered`), not `asker`, reports a trainer gone."""
    if not set(answered) - {asker}:
        raise UserError(
            f"no other trusted peer of run {status.run.id} answered within "
            f"{STATUS_SECONDS_MAX:g} s, so the trainer may only be cut off from here; try again, "
            "or use --force if you know that it is off"
        )
    present = status.present.get(trainer)
    if trainer not in answered and present is None:
        raise UserError(
            f"no trusted peer has heard trainer {trainer} since it was started itself, so it may "
            "have begun just now; use --force if you know that it is off"
        )
    age = 0.0 if trainer in answered or present is None else present.age_seconds
    if age < GONE_SECONDS:
        raise UserError(
            f"trainer {trainer} was heard {age:.0f} s ago; stop it first, and wait "
            f"{GONE_SECONDS:g} s. With --force it is replaced while it trains, and stops"
        )
