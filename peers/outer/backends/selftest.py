"""The check at the end of an installation: one trainer alone averages its own update.

Runs under the environment's interpreter; the argument names the backend."""

import importlib
import importlib.metadata
import sys
import tempfile
from pathlib import Path

import torch
import trio

from peers.outer.backends.installed import SERVICES
from peers.outer.learning.contribution import Contribution, write_values
from swarm.jobs.averaging import AverageRound, AveragingSetup
from swarm.wire.identity import Identity

SHAPES = {"weight": (10, 99), "bias": (10,)}


async def check(name: str, folder: Path) -> None:
    """Raises what fails."""
    module, _, service = SERVICES[name].partition(":")
    only = (Identity(bytes(32)).peer_id,)
    setup = AveragingSetup(run="selftest", shapes=SHAPES, state_bytes=8, trainers=1, members=only)
    update = torch.linspace(-1, 1, 1000)
    write_values(update, SHAPES, folder / "update")
    (folder / "state").write_bytes(bytes(8))
    child = getattr(importlib.import_module(module), service)(setup)
    await child.average(
        AverageRound(
            round=1,
            tokens=7,
            update=str(folder / "update"),
            state=str(folder / "state"),
            average=str(folder / "average"),
            received=str(folder / "received"),
        )
    )
    with Contribution(folder / "average", SHAPES) as average:
        same = torch.allclose(average.values(), update, rtol=1e-6)
    assert same, f"{name} changed an update of one trainer"
    await child.end()


def main() -> None:
    name = sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        trio.run(check, name, Path(folder))
    print(f"{name} {importlib.metadata.version(name)} averages")


if __name__ == "__main__":
    main()
