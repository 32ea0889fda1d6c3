"""Options of `swarm demo`, and their bounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from peers.demo.recipes import recipe_of
from swarm.errors import UserError
from swarm.terminal.output import check_writable

PEERS_MAX = 64
STEPS_MAX = 100_000
SEED_MAX = 2**63 - 1
"""Largest integer of TOML, in which the trainer reads its seed."""


@dataclass(frozen=True)
class DemoOptions:
    """Options of `swarm demo`."""

    age_seconds: float = 0.0
    """Age of the process, so that the time of its imports counts as well."""
    environment: str = "sort-digits"
    """Name of the recipe, among `peers.demo.recipes.RECIPES`."""
    steps: int = 250
    peers: int = 3
    seed: int = 0
    keep: Path | None = None
    json_file: Path | None = None
    cheat: bool = False
    """The last inference peer generates with altered weights."""
    plain: bool = False


def check_options(options: DemoOptions) -> None:
    recipe_of(options.environment)
    if not 1 <= options.steps <= STEPS_MAX:
        raise UserError(f"--steps is {options.steps}; give 1 to {STEPS_MAX}")
    if not 1 <= options.peers <= PEERS_MAX:
        raise UserError(f"--peers is {options.peers}; give 1 to {PEERS_MAX}")
    if not 0 <= options.seed <= SEED_MAX:
        raise UserError(f"--seed is {options.seed}; give 0 to {SEED_MAX}")
    if options.cheat and options.peers < 2:
        raise UserError("--cheat needs an honest peer beside the cheater; give --peers 2 or more")
    if options.keep is not None and (options.keep / "peers").exists():
        raise UserError(
            f"--keep {options.keep} holds the peers of an earlier demo; "
            "choose another folder, or remove it"
        )
    for path in (options.keep, options.json_file and options.json_file.parent):
        if path is not None:
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise UserError(f"{path} cannot be made ({error.strerror})") from error
    check_writable("--json", options.json_file)
