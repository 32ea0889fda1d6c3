"""Updates: pseudo-gradients as flat fp32 files, in the form that other libraries average.

An update has the values of all tensors, in the order of their names, little-endian.
"""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from peers.outer.learning import contribution
from peers.outer.learning.compression import VALUE_MAX, BadContribution
from peers.outer.learning.contribution import Contribution, Header, pieces
from peers.outer.learning.tensor_file import Shapes
from swarm.world.progress import report


def elements_of(shapes: Shapes) -> int:
    """Number of values of an update."""
    return sum(map(prod, shapes.values()))


def write_update(given: Contribution, shapes: Shapes, path: Path) -> None:
    """Write a contribution's values as an update."""
    with path.open("wb") as file:
        for name, shape in shapes.items():
            for piece in pieces(shape):
                report()
                file.write(given.piece(name, piece).numpy().astype("<f4").tobytes())


def write_contribution(update: Path, shapes: Shapes, path: Path) -> None:
    """Write an update as a contribution in fp32.

    Raises `BadContribution` if it has another size or a value that no contribution can have.
    """
    count = elements_of(shapes)
    if update.stat().st_size != 4 * count:
        raise BadContribution(
            f"the average has {update.stat().st_size} bytes; the policy's has {4 * count}"
        )
    values = np.memmap(update, "<f4", "r")
    starts, start = {}, 0
    for name, shape in shapes.items():
        starts[name] = start
        start += prod(shape)

    def piece_of(name: str, piece: slice) -> Tensor:
        first = starts[name] + piece.start
        found = torch.from_numpy(np.array(values[first : first + piece.stop - piece.start], "f4"))
        if not float(found.abs().max()) <= VALUE_MAX:  # nor NaN
            raise BadContribution(
                f"the average of tensor {name} is not finite, or above {VALUE_MAX:g}"
            )
        return found

    contribution.write(path, Header("fp32", list(shapes.items())), piece_of, lambda *_: None)
