"""A standby takes a trainer's place: it signs the version of the run that says so."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import trio

from swarm.errors import PeerError, SwarmError, UserError
from swarm.ledger.client import LedgerClient
from swarm.look.archives import learn_versions
from swarm.look.onlooker import STATUS_SECONDS_MAX, RunStatus, ask_all
from swarm.node.local import last_bootstrap, visit
from swarm.node.node import Node
from swarm.run.choice import check_joined
from swarm.run.lease import HEARTBEAT_SECONDS
from swarm.run.manifest import content_digest, manifest_in
from swarm.run.manifest_exchange import ask_for_manifests
from swarm.run.run import Run
from swarm.run.update import sign_takeover
from swarm.sentences import numbered
from swarm.wire.envelope import Envelope
from swarm.wire.identity import Identity, PeerId, load_or_create
from swarm.world.disk import LocalDisk

GONE_SECONDS = 60.0
"""A trainer that no trusted peer has heard for this long is gone: six heartbeats."""

LISTENING_SECONDS = 2 * HEARTBEAT_SECONDS
"""Time to listen for a trainer that no trusted peer reports, because they were started after it was
lost, or because it has only just started. A trainer that lives sends four digests meanwhile."""

ASKING_SECONDS = 5.0
"""Time from one question for signs of life to the next."""


@dataclass(frozen=True)
class Takeover:
    """What the operator asks for."""

    home: Path
    """The standby's home."""
    bootstrap: Sequence[str]
    run: str | None
    trainer: str | None
    """The trainer whose place is taken; None: the first one."""
    force: bool
    """Do not check that the trainer is gone."""


async def take_over(wanted: Takeover) -> None:
    """Sign a takeover and hand it to every peer that can be reached; print what was done.

    Raises `UserError` unless the trainer is gone, and `PeerError` if no peer takes it.
    """
    key = wanted.home.expanduser() / "identity.key"
    if not key.exists():
        raise UserError(f"--home {wanted.home} has no identity.key; give the standby's home")
    standby = load_or_create(key)
    bootstrap = list(wanted.bootstrap) or last_bootstrap(wanted.home)
    async with visit(bootstrap, wanted.run, looks_on=True) as (node, run):
        await check_joined(LocalDisk(wanted.home.expanduser()), run.id, wanted.run)
        learn_versions(wanted.home.expanduser(), run)
        status = RunStatus(run)
        answered = await ask_all_trusted(node, status)
        trainer = _trainer(run, standby.peer_id, wanted.trainer)
        if not wanted.force:
            age = await last_sign_of_life(node, status, answered, trainer, standby.peer_id)
            _check_gone(trainer, age)
        envelope = _signed(run, standby, trainer)
        taken = await _hand_over(node, run, envelope)
    print(f"run {run.id}: version {run.manifest.version} → {run.manifest.version + 1}")
    print(f"trainer {trainer} → {standby.peer_id}; the trainer before is a standby now")
    print(numbered(f"{len(taken)} peers have it, and tell all others"))
    shown = status.present.get(standby.peer_id)
    if shown is None:
        print(
            "start this peer: python -m swarm.peer --role trainer --home "
            f"{wanted.home} --bootstrap {bootstrap[0]} --config FILE"
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


async def last_sign_of_life(
    node: Node, status: RunStatus, answered: Sequence[str], trainer: str, asker: str
) -> float | None:
    """Return the seconds since a trusted peer heard a trainer; None: none has.

    `answered`: those that have answered so far. If none of them reports the trainer, this listens
    for `LISTENING_SECONDS` and says so. Raises `UserError` if no trusted peer but `asker` answers.
    """
    until = node.world.now() + LISTENING_SECONDS
    told = False
    while (age := _silence(status, answered, trainer, asker)) is None:
        if node.world.now() >= until:
            break
        if not told:
            told = True
            print(
                f"no trusted peer reports trainer {trainer}; listening for "
                f"{LISTENING_SECONDS:g} s for a sign of life"
            )
        await trio.sleep(ASKING_SECONDS)
        answered = await ask_all_trusted(node, status)
    return age


def _check_gone(trainer: str, age: float | None) -> None:
    """Raise `UserError` if a trainer was heard lately."""
    if age is not None and age < GONE_SECONDS:
        raise UserError(
            f"trainer {trainer} was heard {age:.0f} s ago; stop it first, and wait "
            f"{GONE_SECONDS:g} s. With --force it is replaced while it trains: it stops, and the "
            "steps since its last bundle are lost"
        )


def _silence(status: RunStatus, answered: Sequence[str], trainer: str, asker: str) -> float | None:
    """Seconds since a trainer's last sign of life; None if no trusted peer reports it.

    Raises `UserError` unless a trusted peer other than `asker` has answered.
    """
    if not set(answered) - {asker}:
        raise UserError(
            f"no other trusted peer of run {status.run.id} answered within "
            f"{STATUS_SECONDS_MAX:g} s, so the trainer may only be cut off from here; try again, "
            "or use --force if you know that it is off"
        )
    if trainer in answered:
        return 0.0
    present = status.present.get(trainer)
    return None if present is None else present.age_seconds


def _signed(run: Run, standby: Identity, trainer: str) -> Envelope:
    envelope = sign_takeover(standby, run.manifest_envelope, trainer, time.time())
    refused = run.refusal(standby.peer_id, manifest_in(envelope))
    if refused is not None:
        raise UserError(f"{refused}; the run's owner must sign a new version first")
    return envelope


async def _hand_over(node: Node, run: Run, envelope: Envelope) -> list[PeerId]:
    """Hand the version to the bootstrap peers and all trusted peers that can be reached."""
    taken: list[PeerId] = []
    problems: list[str] = []

    async def hand_to(peer: PeerId) -> None:
        try:
            if peer not in node.transport.connected():
                await node.reach(peer)
            held = await ask_for_manifests(node.transport, peer, envelope.raw)
        except SwarmError as error:
            problems.append(str(error))
            return
        if any(content_digest(each) == content_digest(envelope) for each in held):
            taken.append(peer)
        else:
            problems.append(f"{peer} has another version")

    named = [address.rpartition("/p2p/")[2] for address in node.bootstrap]
    with trio.move_on_after(STATUS_SECONDS_MAX):
        async with trio.open_nursery() as nursery:
            for peer in dict.fromkeys([*named, *run.manifest.trusted_ids()]):
                nursery.start_soon(hand_to, PeerId(peer))
    if not taken:
        raise PeerError(f"no peer took the takeover: {'; '.join(problems) or 'none answered'}")
    return sorted(taken)
