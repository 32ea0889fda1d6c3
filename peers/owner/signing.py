"""Commands of a run's owner: sign the manifest, sign a newer version, hand it to the network."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from peers.calibration.of_run import Measuring, settle
from peers.environments.run_probe import described, model_of
from swarm.errors import PeerError, UserError
from swarm.ledger.client import LedgerClient
from swarm.look.onlooker import ask_all, learn_expulsions
from swarm.node.local import visit
from swarm.node.node import Node
from swarm.node.trusted import EVICTION_LIFETIME_SECONDS
from swarm.run.bounds import check_peer_id
from swarm.run.manifest import load_manifest, manifest_in, run_id
from swarm.run.manifest_exchange import BOOTSTRAP_SECONDS
from swarm.run.run import Run
from swarm.run.update import check_update, hand_over, listed, sign_manifest, signed_before
from swarm.settings import PeerSettings
from swarm.terminal.interrupt import run_until_interrupted
from swarm.wire.envelope import Envelope, seal
from swarm.wire.identity import Identity, load_or_create
from swarm.wire.manifest import ADVANTAGES, OBJECTIVES, VERSION_MAX, RunManifest
from swarm.wire.messages import Eviction, Reinstatement
from swarm.wire.succession import inherited, ownership_of


def owners_key(signer: str, chosen: Path | None) -> Identity:
    """Load the key that signed a run; raises `UserError` for another key."""
    key = chosen or default_key()
    if not key.exists():
        raise UserError(f"there is no key {key}; give the key that signed the run with --owner-key")
    owner = load_or_create(key)
    if owner.peer_id != signer:
        raise UserError(
            f"--owner-key {key} is the key of {owner.peer_id}, but the run was signed by "
            f"{signer}; only that key can change it"
        )
    return owner


def default_key() -> Path:
    """Return the owner's key file in the default home, where nobody commits it by mistake."""
    return PeerSettings().home_path / "owner.key"


@dataclass(frozen=True)
class OwnersFiles:
    """Files that the owner's commands read and write."""

    description: Path
    """TOML file that describes the run."""
    manifest: Path
    """Signed manifest; each version replaces the one before."""
    key: Path | None
    """The owner's key; None stands for the key in the default home."""
    tokenizer: Path | None
    """Folder with `tokenizer.json` and `config.json`; None stands for the model's folder."""
    ungradable_max: float
    """Share of a data set's rows of which no rollout can be made."""
    measuring: Measuring

    def settled(self, manifest: RunManifest, before: RunManifest | None) -> RunManifest:
        """The manifest with its thresholds, and the hash of the packages of its objective."""
        objective = replace(manifest.objective, digest=b"")
        built_in = objective.name in OBJECTIVES and objective.advantage in ADVANTAGES
        if not built_in or objective.options or objective.advantage_options:
            from peers.learning.trial import with_digest  # imports torch, which takes seconds

            objective = with_digest(objective)
        manifest = replace(manifest, objective=objective)
        model = self.tokenizer or model_of(self.description, manifest.model).folder
        return settle(manifest, before, model, self.measuring, self.description)


def create_run(files: OwnersFiles) -> None:
    """Sign the first version of a run and print the next commands to type."""
    manifest = described(files.description, files.tokenizer, files.ungradable_max)
    key = files.key or default_key()
    owner = load_or_create(key)
    before = signed_before(files.manifest, owner.peer_id, manifest.name)
    earlier = None if before is None else manifest_in(before)
    manifest = files.settled(manifest, earlier)
    if earlier is not None:
        check_update(earlier, manifest, str(files.description))
    envelope = sign_manifest(owner, manifest, time.time())
    _write_manifest(files.manifest, envelope)
    print(
        f"run {run_id(envelope)}, version {manifest.version}: signed manifest in {files.manifest}"
    )
    print(f"owner key: {key} (keep it safe: its holder controls the run)")
    print("next, a peer that hands the manifest out, the trainer, the validators, and workers:")
    print(f"  swarm peer --role bootstrap --home HOME --manifest {files.manifest}")
    for role, more in (("trainer", " --config FILE"), ("validator", ""), ("inference", "")):
        print(f"  swarm peer --role {role} --home HOME --bootstrap MULTIADDR{more}")
    print("each with a HOME of its own; of trainers and validators that in which `swarm id` made")
    print("its key. The first prints MULTIADDR")


def update_run(files: OwnersFiles, bootstrap: list[str]) -> None:
    """Sign another version of a run; hand it to the network if `bootstrap` is not empty."""
    if not files.manifest.exists():
        raise UserError(
            f"there is no signed manifest {files.manifest} to change; name it, or sign the first "
            f"version with swarm run create {files.description}"
        )
    held = load_manifest(files.manifest)
    new = described(files.description, files.tokenizer, files.ungradable_max)
    new = files.settled(new, manifest_in(held))
    if bootstrap:
        run_until_interrupted(_update_network, files, held, new, bootstrap)
        return
    _sign_update(files, held, new)
    print("next, hand it to the running network:")
    print(f"  swarm run update {files.description} {files.manifest} --bootstrap MULTIADDR")
    print(f"or restart its bootstrap peer with --manifest {files.manifest}")


async def _update_network(
    files: OwnersFiles, held: Envelope, new: RunManifest, bootstrap: list[str]
) -> None:
    """Update a run that the network knows. Its version may be newer than the local file."""
    async with visit(bootstrap, held.body.run) as (node, run):
        check_update(run.manifest, new, f"{files.description} (compared with the running network)")
        await _hand_over(node, _sign_update(files, _newer(run.manifest_envelope, held), new))


def _newer(one: Envelope, other: Envelope) -> Envelope:
    """The one of two versions of a run that counts."""
    return max(other, one, key=lambda each: ownership_of(each).precedence)


async def _hand_over(node: Node, envelope: Envelope) -> None:
    for peer in await hand_over(node.transport, node.bootstrap, envelope):
        print(
            f"bootstrap peer {peer} has it; the trusted peers ask there every "
            f"{BOOTSTRAP_SECONDS:g} s, and forward it to all peers"
        )


def _sign_update(files: OwnersFiles, held: Envelope, new: RunManifest) -> Envelope:
    """Sign `new` as the successor of `held` and print the changes; return `held` if unchanged."""
    before = manifest_in(held)
    found = check_update(before, new, str(files.description))
    if new.version == before.version:
        print(f"run {held.body.run}: version {new.version} is signed already, nothing has changed")
        return held
    owner = owners_key(ownership_of(held).owner, files.key)
    return _signed(owner, held, new, files.manifest, listed(found))


def _signed(
    signer: Identity, held: Envelope, new: RunManifest, path: Path, changes: Sequence[str]
) -> Envelope:
    """Sign the version after `held`, and put it in its place; `changes` says what differs."""
    new = inherited(held, signer.peer_id, new)
    envelope = sign_manifest(signer, new, time.time(), held.body.run)
    _write_manifest(path, envelope)
    print(f"run {held.body.run}: version {manifest_in(held).version} → {new.version}")
    print("\n".join(changes))
    print(f"signed manifest in {path}")
    return envelope


def succeed(manifest: Path, key: Path, successors: list[str] | None, bootstrap: list[str]) -> None:
    """Sign the version of `manifest` that makes `key` the owner, write it there, and hand it over.

    `successors` may own the run next; None: the other successors. With `bootstrap`, a newer version
    of the network is the one succeeded, so that an old file does not bring back what has
    changed."""
    if not key.exists():
        raise UserError(f"there is no key {key}; give the successor's key with --owner-key")
    for each in successors or []:
        check_peer_id(each, "--successor")
    held, signer = load_manifest(manifest), load_or_create(key)

    def sign(held: Envelope) -> Envelope:
        before, owner = manifest_in(held), ownership_of(held).owner
        if owner == signer.peer_id:
            raise UserError(f"{owner} owns run {held.body.run} already; nothing to succeed to")
        others = [each for each in before.successors if each != signer.peer_id]
        named = others if successors is None else successors
        new = replace(before, version=before.version + 1, successors=named)
        changes = [
            f"owner {owner} → {signer.peer_id}; the run's id stays",
            f"successors: {', '.join(named) or 'none'}",
        ]
        return _signed(signer, held, new, manifest, changes)

    async def sign_in_network() -> None:
        async with visit(bootstrap, held.body.run) as (node, run):
            before = _newer(run.manifest_envelope, held)
            if manifest_in(before).version > VERSION_MAX // 2:
                before = held  # a thief of the key may have left no number for versions after his
            await _hand_over(node, sign(before))

    if bootstrap:
        run_until_interrupted(sign_in_network)
        return
    sign(held)
    print(f"next, restart the run's bootstrap peer with --manifest {manifest}")


@dataclass(frozen=True)
class Reinstated:
    """The outcome of a reinstatement."""

    peer: str
    eviction: Eviction
    """The eviction that it overrules."""
    logged: list[str]
    """Trusted peers that have it in their logs."""
    problems: list[str]
    """One sentence per trusted peer that did not answer."""


async def reinstate(
    node: Node, run: Run, peer: str, reason: str, owner_key: Path | None
) -> Reinstated:
    """Sign an evicted peer's reinstatement for the trusted peers. Raises `UserError` if it is not
    evicted or the key not the owner's, `PeerError` if nobody takes the message."""
    owner = owners_key(run.owner, owner_key)
    problems: list[str] = []
    await learn_expulsions(node, run, peer, problems)
    eviction = run.evicted(peer)
    if eviction is None:
        reasons = f" ({'; '.join(problems)})" if problems else ""
        raise UserError(f"{peer} is not evicted from {run.id}; nothing to reinstate{reasons}")
    # A reinstatement overrules evictions issued before it, also by a peer whose clock is ahead.
    evicted = max(each.body.issued_ms for each in run.expulsions_of(peer))
    wall_time = max(node.world.wall_time(), (evicted + 1) / 1000)
    envelope = seal(
        owner,
        Reinstatement(peer=peer, reason=reason),
        run=run.id,
        sequence=int(wall_time * 1000),
        wall_time=wall_time,
        lifetime_seconds=EVICTION_LIFETIME_SECONDS,
    )
    logged: list[str] = []

    async def hand_over_to(client: LedgerClient) -> None:
        await client.reinstate(envelope)
        logged.append(client.peer)

    problems.clear()
    await ask_all(node, run.manifest.trusted_ids(), hand_over_to, problems)
    if not logged:
        raise PeerError(f"no trusted peer took the reinstatement: {'; '.join(problems)}")
    return Reinstated(peer, eviction, sorted(logged), problems)


def _write_manifest(target: Path, envelope: Envelope) -> None:
    """Replace a file by a signed manifest, atomically."""
    aside = target.with_name(f"{target.name}.new")
    try:
        aside.write_bytes(envelope.raw)
        aside.replace(target)
    except OSError as error:
        raise UserError(f"{target} cannot be written ({error.strerror})") from error
