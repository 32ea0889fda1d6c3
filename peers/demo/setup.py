"""The options of a demo, its run, its peers, and their settings."""

import itertools
import json
import random
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path

from msgspec.structs import replace

from peers.demo.recipes import MODEL, OBJECTIVE, RECIPES, Recipe
from swarm.errors import UserError
from swarm.roles import check_tables
from swarm.run.toml import RunHashes
from swarm.settings import ROLE_GROUP, load_settings
from swarm.wire.identity import Identity, load_or_create
from swarm.wire.manifest import Admissions, OptionValue, RunManifest, TrustedKey
from swarm.world.machine import free_memory_bytes


@dataclass
class LocalPeer:
    """One peer on loopback. Its identity and ports stay the same across restarts."""

    name: str
    role: str
    identity: Identity
    home: Path
    port: int
    bulk_port: int
    arguments: list[str] = field(default_factory=list)
    """Command-line arguments beyond role, home and ports."""

    @property
    def multiaddr(self) -> str:
        return f"/ip4/127.0.0.1/tcp/{self.port}/p2p/{self.identity.peer_id}"

    def command(self, restart: bool) -> list[str]:
        resume = ["--resume"] if restart and self.role == "trainer" else []
        return [
            sys.executable,
            "-m",
            "swarm.peer",
            *("--role", self.role),
            *("--home", str(self.home)),
            *("--listen", f"/ip4/127.0.0.1/tcp/{self.port}"),
            *("--bulk-port", str(self.bulk_port)),
            *self.arguments,
            *resume,
            "--json-logs",
        ]


def free_ports(count: int) -> list[int]:
    """Find distinct loopback TCP ports that are free at this moment.

    The kernel gives the ports from 32,768 on to outgoing connections, which could take one before
    its peer listens there."""
    drawn = random.SystemRandom().sample(range(10_000, 32_768), 1000)
    found = list(itertools.islice(filter(_is_free, drawn), count))
    if len(found) < count:
        raise UserError("no free ports: programs here listen on nearly all from 10,000 to 32,767")
    return found


def _is_free(port: int) -> bool:
    with socket.socket() as tried, suppress(OSError):
        tried.bind(("127.0.0.1", port))
        return True
    return False


Setting = str | int | float | bool | Sequence[str]

GB = 10**9


def write_config(path: Path, role: str, settings: Mapping[str, Setting]) -> None:
    """Write a peer's TOML settings: one role's table."""
    # JSON's scalars and lists are valid TOML.
    lines = [f"{key} = {json.dumps(value)}" for key, value in settings.items()]
    path.write_text(f"[{role}]\n" + "\n".join(lines) + "\n", encoding="utf-8")


PEERS_MAX = 64
STEPS_MAX = 100_000
SEED_MAX = 2**63 - 1
"""Largest integer of TOML, in which the trainer reads its seed."""


@dataclass(frozen=True)
class DemoOptions:
    """Options of `swarm demo`."""

    model: str | None = None
    """A model to train, in any form of `peers.models.find`; None: a small one is made."""
    environment: str = "sort-digits"
    """Name of a recipe, among `peers.demo.recipes.RECIPES`, or of an environment."""
    environment_options: Mapping[str, OptionValue] = field(default_factory=dict)
    steps: int | None = None
    """None: as many as the recipe says."""
    peers: int = 3
    seed: int = 0
    out: Path | None = None
    cheat: str | None = None
    """One of `CHEATS`: how the last inference peer cheats."""
    plain: bool = False
    as_json: bool = False
    settings: Sequence[str] = ()
    """NAME=VALUE and alarms.NAME=VALUE for every peer, or ROLE.NAME=VALUE."""


def check_options(options: DemoOptions) -> None:
    check_tables(load_settings(None, {}, [*options.settings, "trainer.model=."]))  # the demo's own
    if options.steps is not None and not 1 <= options.steps <= STEPS_MAX:
        raise UserError(f"--steps is {options.steps}; give 1 to {STEPS_MAX}")
    if not 1 <= options.peers <= PEERS_MAX:
        raise UserError(f"--peers is {options.peers}; give 1 to {PEERS_MAX}")
    if not 0 <= options.seed <= SEED_MAX:
        raise UserError(f"--seed is {options.seed}; give 0 to {SEED_MAX}")
    if options.cheat not in (None, *CHEATS):
        raise UserError(f"--cheat is {options.cheat!r}; give one of: {', '.join(CHEATS)}")
    if options.cheat and options.peers < 2:
        raise UserError("--cheat needs an honest peer beside the cheater; give --peers 2 or more")
    if options.out is not None and (options.out / "peers").exists():
        raise UserError(
            f"--out {options.out} holds the peers of an earlier demo; "
            "choose another folder, or remove it"
        )
    if options.out is not None:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{options.out} cannot be made ({error.strerror})") from error


def check_memory(model: Path, options: DemoOptions) -> None:
    """Raise `UserError` if a model that is given is too large for this machine, in fp32: of SmolLM2
    11 GB were measured with two inference peers. A larger model's trainer makes its own plan."""
    stored = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    needed = (
        2 * stored * (2 + options.peers)  # of trainer, validator and inference peers
        + min(17 * stored, PASS_BYTES)
        + (1 + options.peers) * min(5 * stored, BATCH_BYTES)
        + PEER_BYTES * len(cast(options.peers))
    )
    if needed > (free := free_memory_bytes()):
        raise UserError(
            f"a demo with --model {options.model} and {options.peers} inference peers needs about "
            f"{needed / GB:.1f} GB of memory, and {free / GB:.1f} GB are free; give a smaller model"
            + (", or --peers 1" if options.peers > 1 else "")
        )


PASS_BYTES = 45 * GB // 10
"""Of the trainer's pass over `PASS_TOKENS` tokens of a vocabulary of 49,152, and its gradients."""
BATCH_BYTES = 12 * GB // 10
"""Of a batch in an inference peer or a validator."""
PEER_BYTES = GB // 10


SUBMISSIONS_PER_STEP = 2
"""A submission of any size costs 35 ms of CPU in all processes; four groups generate in less."""

CHEATS: Mapping[str, dict[str, Setting]] = {
    "wrong-weights": {"alter_weights": 0.1},
    "int8": {"round_weights": "int8"},
}
"""Settings of the cheater. The noise is relative to the standard deviation of each tensor."""
PASS_TOKENS = 2048
"""Tokens in a trainer's pass of a given model: more take more memory, and no less time."""
STARVED_SECONDS = 30.0
"""Time without rollouts after which the trainer reports it. A demo lasts only a few minutes."""


def demo_manifest(
    *,
    name: str,
    recipe: Recipe = RECIPES["sort-digits"],
    steps: int | None = None,
    hashes: RunHashes,
    trainer: str,
    validator: str,
    groups_per_submission: int | None = None,
    model: str = MODEL,
) -> RunManifest:
    """Make the run manifest of the demo. `hashes`: see `probe_hashes`. `steps`: None stands for
    those of the recipe. `model`: its name."""
    sampling = recipe.sampling
    if groups_per_submission is not None:
        sampling = replace(sampling, groups_per_submission=groups_per_submission)
    found = entry_points(group=ROLE_GROUP)
    others = [each.name for each in found if not each.module.startswith("peers.")]
    return RunManifest(
        name=name,
        version=1,
        model=model,
        tokenizer_hash=hashes.tokenizer,
        environments=[
            replace(reference, probe_hash=probe)
            for reference, probe in zip(recipe.environments, hashes.probes, strict=True)
        ],
        sampling=sampling,
        schedule=replace(recipe.schedule, steps=steps or recipe.schedule.steps),
        objective=OBJECTIVE,
        optimiser=recipe.optimiser,
        adapter=recipe.adapter,
        trainers=[TrustedKey(peer=trainer)],
        validators=[TrustedKey(peer=validator)],
        thresholds=recipe.thresholds,
        admissions=Admissions(further_roles=sorted(others)),  # of packages installed here
        checkpoints_kept=5,
    )


def cast(inference_peers: int) -> list[tuple[str, str]]:
    """List the name and role of every peer of a demo."""
    return [
        ("bootstrap", "bootstrap"),
        ("relay-1", "relay"),
        ("relay-2", "relay"),
        ("trainer", "trainer"),
        ("validator", "validator"),
        *((f"inference-{index + 1}", "inference") for index in range(inference_peers)),
    ]


def make_peers(folder: Path, inference_peers: int) -> list[LocalPeer]:
    roles = cast(inference_peers)
    ports = free_ports(2 * len(roles))
    return [
        LocalPeer(
            name=name,
            role=role,
            identity=load_or_create(folder / "peers" / name / "identity.key"),
            home=folder / "peers" / name,
            port=ports[2 * index],
            bulk_port=ports[2 * index + 1],
        )
        for index, (name, role) in enumerate(roles)
    ]


def configure(peers: list[LocalPeer], bootstrap: str, base: Path, options: DemoOptions) -> None:
    """Set the arguments of every peer but the bootstrap peer. `base`: the base policy's folder."""
    for peer in peers:
        if peer.role == "bootstrap":
            continue
        peer.arguments = ["--bootstrap", bootstrap]
        settings: dict[str, Setting] = {}
        if peer.role == "trainer":
            settings = {
                "model": str(base),
                "seed": options.seed,
                "starved_seconds": STARVED_SECONDS,
            }
            if options.model is not None:
                settings["pass_tokens"] = PASS_TOKENS
        elif options.cheat is not None and peer is peers[-1]:
            settings = CHEATS[options.cheat]
        if settings:
            config = peer.home / "settings.toml"
            write_config(config, peer.role, settings)
            peer.arguments += ["--config", str(config)]
        for each in options.settings:
            if each.partition("=")[0].rpartition(".")[0] in ("", "alarms", peer.role):
                peer.arguments += ["--set", each]
