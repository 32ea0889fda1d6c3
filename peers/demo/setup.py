"""The run of a demo, its peers, and their settings."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from peers.demo.local_peers import LocalPeer, free_ports, write_config
from peers.demo.options import DemoOptions
from peers.demo.recipes import MODEL, OBJECTIVE, RECIPES, THRESHOLDS, Recipe
from swarm.run.toml import RunHashes
from swarm.wire.identity import load_or_create
from swarm.wire.manifest import RunManifest, TrustedKey

PRELOAD_COMPUTE = (
    "transformers.models.qwen2.modeling_qwen2",
    "peers.engines.service",
    "peers.validator.inspector",
    "peers.validator.prefill",
    "peers.trainer.service",
)
"""Modules that the fork server of the compute children imports, torch among them."""

PRELOAD_PEERS = (
    "swarm.commands.start",
    "swarm.commands.peer",
    "peers.inference.role",
    "peers.relay",
    "peers.trainer.role",
    "peers.validator.role",
)
"""Modules that the fork server of the peers imports; none of them imports torch."""

SUBMISSIONS_PER_STEP = 2
"""A submission costs about 35 ms of CPU time in all processes, whatever its size:
its file, push, announcement, receipt, verdict, and the copy for the trainer. Generating four groups
takes less than that."""

ALTERED_WEIGHTS = 0.1
"""Noise of the cheater's weights, relative to the standard deviation of each tensor."""
STARVED_SECONDS = 30.0
"""Time without rollouts after which the trainer reports it. A demo lasts only a few minutes."""


def demo_manifest(
    *,
    name: str,
    recipe: Recipe = RECIPES["sort-digits"],
    steps: int,
    hashes: RunHashes,
    trainer: str,
    validator: str,
    groups_per_submission: int | None = None,
) -> RunManifest:
    """Make the run manifest of the demo. `hashes`: see `probe_hashes`."""
    sampling = recipe.sampling
    if groups_per_submission is not None:
        sampling = replace(sampling, groups_per_submission=groups_per_submission)
    return RunManifest(
        name=name,
        version=1,
        model=MODEL,
        tokenizer_hash=hashes.tokenizer,
        environments=[
            replace(reference, probe_hash=probe)
            for reference, probe in zip(recipe.environments, hashes.probes, strict=True)
        ],
        sampling=sampling,
        schedule=replace(recipe.schedule, steps=steps),
        objective=OBJECTIVE,
        optimiser=recipe.optimiser,
        trainers=[TrustedKey(peer=trainer)],
        validators=[TrustedKey(peer=validator)],
        thresholds=THRESHOLDS,
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
    """Set the arguments of every peer but the bootstrap peer.

    `base` is the folder of the base policy. With `--cheat` the last peer cheats.
    """
    for peer in peers:
        if peer.role == "bootstrap":
            continue
        peer.arguments = ["--bootstrap", bootstrap]
        settings: dict[str, str | int | float | bool] = {}
        if peer.role == "trainer":
            settings = {
                "model": str(base),
                "prepare_base": options.environment,
                "seed": options.seed,
                "evaluate": True,
                "starved_seconds": STARVED_SECONDS,
            }
        elif options.cheat and peer is peers[-1]:
            settings = {"alter_weights": ALTERED_WEIGHTS}
        if settings:
            config = peer.home / "settings.toml"
            write_config(config, peer.role, settings)
            peer.arguments += ["--config", str(config)]
