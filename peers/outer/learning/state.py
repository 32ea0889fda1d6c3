"""The outer state: the weights that all trainers agree on, and the momentum of their updates.

Both are fp32, in one file that is mapped into memory, so they take none of a device's memory. The
file's digest is the state's digest: equal digests mean equal weights.

`merge` is a pure function of the state before and a list of contributions; so are `merge_shard`,
the mean of one part of all values, and `apply`, which takes the step from the means of all parts.
What a trainer says of its own contribution bounds nothing, so the median of all does (`shares`).
Every operation is one rounded IEEE operation per element (a product and a sum are never fused), in
the order of the trainers' ids, so neither the machine, the number of threads nor the order of
arrival changes a bit."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

import torch
from torch import Tensor

from peers.learning.stored import Slices
from peers.outer.learning.contribution import Contribution, Header, cut, pieces, write_mean
from peers.outer.learning.tensor_file import Shapes, TensorFile, TensorFileWriter
from swarm.errors import UserError
from swarm.world.progress import report

PieceOf = Callable[[str, slice], Tensor]
"""Gives a piece of a tensor, flat fp32."""

FILE = "outer.safetensors"
"""Name of the file in a state's folder."""

NORM_MEDIANS = 2.0
"""Largest norm of a contribution in the merge, in medians of all. Honest ones of as many steps
differ by less, so none of theirs is changed."""

_FORMAT = "swarm-outer-state-1"
_WEIGHT, _MOMENTUM = "weight.", "momentum."


@dataclass(frozen=True)
class OuterOptimiser:
    """Nesterov momentum on the mean pseudo-gradient (DiLoCo, 2311.08105)."""

    learning_rate: float = 0.7
    momentum: float = 0.9


@dataclass(frozen=True)
class Given:
    """A contribution to merge."""

    trainer: str
    """Peer id; the order of the sum."""
    tokens: int
    """Its weight in the mean, up to the median of all."""
    path: Path
    norm: float | None = None
    """Of its values, from `Contribution.check`; None: `merge` computes it."""
    weight: float | None = None
    """Of a stranger beside a trainer's 1; None: it is a trainer's."""


class StateFile:
    """An outer state on disk."""

    def __init__(self, path: Path) -> None:
        """Open the file; raises `UserError` if it is no outer state."""
        self._file = TensorFile(path, _FORMAT)
        self.path = path
        self.shapes: Shapes = {
            name.removeprefix(_WEIGHT): shape
            for name, shape in self._file.shapes.items()
            if name.startswith(_WEIGHT)
        }
        if dict(self._file.shapes) != _stored(self.shapes):
            raise UserError(f"{path} is no outer state: each weight needs a momentum of its shape")

    def weight(self, name: str, piece: slice = slice(None)) -> Tensor:
        """A piece of a weight, flat fp32."""
        return self._file.piece(_WEIGHT + name, piece)

    def momentum(self, name: str, piece: slice = slice(None)) -> Tensor:
        """A piece of a momentum, flat fp32."""
        return self._file.piece(_MOMENTUM + name, piece)

    def part(self, name: str, slices: Slices) -> Tensor:
        """A part of a weight, in its own dimensions; do not write to it."""
        return self._file.part(_WEIGHT + name, slices)

    def digest(self) -> bytes:
        """BLAKE3-256 of the file."""
        return self._file.digest()

    def problem(self, shapes: Shapes) -> str:
        """Why this is no state of a policy of these shapes, in one sentence; empty if it is one."""
        for name in sorted({*shapes, *self.shapes}):
            if self.shapes.get(name) != shapes.get(name):
                return (
                    f"tensor {name} has shape {self.shapes.get(name)}; "
                    f"the policy's is {shapes.get(name)}"
                )
        for name, shape in shapes.items():
            for piece in pieces(shape):
                report()
                found = self.weight(name, piece), self.momentum(name, piece)
                if not all(bool(each.isfinite().all()) for each in found):
                    return f"tensor {name} has a value that is not finite"
        return ""


def _stored(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a state file."""
    return {
        prefix + name: shape for name, shape in shapes.items() for prefix in (_WEIGHT, _MOMENTUM)
    }


def begin(shapes: Shapes, weight_of: Callable[[str], Tensor], path: Path) -> bytes:
    """Write the state before round 1, of these weights without momentum; return its digest."""
    writer = TensorFileWriter(path, _FORMAT, _stored(shapes))
    for name, shape in shapes.items():
        flat = weight_of(name).float().reshape(-1)
        for piece in pieces(shape):
            report()
            writer.write(_WEIGHT + name, piece, flat[piece])
            writer.write(_MOMENTUM + name, piece, torch.zeros(piece.stop - piece.start))
    return writer.finish()


def shares(
    tokens: Sequence[int],
    norms: Sequence[float],
    weights: Sequence[float | None] = (),
    strangers_share: float = 0.0,
) -> list[float]:
    """What each contribution's values are multiplied by in the mean.

    No claim of tokens weighs more than the median one, and a contribution longer than
    `NORM_MEDIANS` median ones is shortened to that. The lower median of an even number, which a
    half of all cannot raise above the largest of the others. Contributions of zeros set no bound.

    Strangers (`weights`; None: a trainer) set no bound at all. Theirs are shortened to the median
    norm, and weigh at most `strangers_share` of the mean together."""
    strangers = [index for index, each in enumerate(weights) if each is not None]
    named = [index for index in range(len(tokens)) if index not in strangers]
    if not named:
        return [0.0] * len(tokens)
    median = median_low([tokens[index] for index in named])
    most = [longest_of([norms[index] for index in named])] * len(tokens)
    given: list[float] = [min(each, median) for each in tokens]
    for index in strangers:
        given[index] *= weights[index] or 0.0
        most[index] /= NORM_MEDIANS
    bound = sum(given[index] for index in named) * strangers_share / (1 - strangers_share)
    beyond = sum(given[index] for index in strangers) / (bound or 1.0)
    for index in strangers:
        given[index] *= 0.0 if not bound else 1 / max(1.0, beyond)
    total = sum(given)
    return [
        weight / total * (longest / norm if norm > longest else 1.0)
        for weight, norm, longest in zip(given, norms, most, strict=True)
    ]


def longest_of(norms: Sequence[float]) -> float:
    """The largest norm of a trainer's contribution that is not shortened."""
    return NORM_MEDIANS * median_low([norm for norm in norms if norm] or [0.0])


@contextmanager
def mean_of(
    given: Sequence[Given],
    shapes: Shapes,
    shard: int = 0,
    shards: int = 1,
    strangers_share: float = 0.0,
) -> Iterator[PieceOf]:
    """Yield what gives the mean of a piece of some contributions' shard, at least one.

    The order of `given` does not matter. Raises `BadContribution` for a file that
    `Contribution.check` refuses."""
    given = sorted(given, key=lambda each: each.trainer)
    with ExitStack() as stack:
        opened = [
            stack.enter_context(Contribution(each.path, shapes, shard, shards)) for each in given
        ]
        norms = [
            file.check() if each.norm is None else each.norm
            for each, file in zip(given, opened, strict=True)
        ]
        weights = [each.weight for each in given]
        factors = shares([each.tokens for each in given], norms, weights, strangers_share)

        def piece_of(name: str, piece: slice) -> Tensor:
            mean = torch.zeros(piece.stop - piece.start)
            for factor, file in zip(factors, opened, strict=True):
                mean += file.piece(name, piece) * factor
            return mean

        yield piece_of


def merge(
    before: StateFile,
    given: Sequence[Given],
    optimiser: OuterOptimiser,
    path: Path,
    strangers_share: float = 0.0,
) -> bytes:
    """Write the state after a round durably; return its digest. `given` is as in `mean_of`."""
    with mean_of(given, before.shapes, strangers_share=strangers_share) as piece_of:
        return _step(before, [(piece_of, cut(before.shapes))], optimiser, path)


def merge_shard(given: Sequence[Given], shapes: Shapes, header: Header, path: Path) -> None:
    """Write the mean of a shard durably, as a contribution's file. `given`: as in `mean_of`; empty:
    0."""
    if not given:
        write_mean(path, header, lambda _, piece: torch.zeros(piece.stop - piece.start))
        return
    with mean_of(given, shapes, header.shard, header.shards) as piece_of:
        write_mean(path, header, piece_of)


def apply(
    before: StateFile, shards: Sequence[Path], optimiser: OuterOptimiser, path: Path
) -> bytes:
    """Write the state after a round durably, from the means of all its shards, in order; return its
    digest. Raises `BadContribution`."""
    with ExitStack() as stack:
        opened = [
            stack.enter_context(Contribution(each, before.shapes, number, len(shards)))
            for number, each in enumerate(shards)
        ]
        return _step(before, [(each.piece, each.cut) for each in opened], optimiser, path)


def _step(
    before: StateFile,
    means: Sequence[tuple[PieceOf, Sequence[tuple[str, slice]]]],
    optimiser: OuterOptimiser,
    path: Path,
) -> bytes:
    """Take the outer step along a mean, which is given in parts that together are everything."""
    writer = TensorFileWriter(path, _FORMAT, _stored(before.shapes))
    for piece_of, parts in means:
        for name, piece in parts:
            report()
            mean = piece_of(name, piece)
            momentum = before.momentum(name, piece) * optimiser.momentum
            momentum += mean
            step = momentum * optimiser.momentum
            step += mean
            step *= optimiser.learning_rate
            writer.write(_WEIGHT + name, piece, before.weight(name, piece) - step)
            writer.write(_MOMENTUM + name, piece, momentum)
    return writer.finish()
