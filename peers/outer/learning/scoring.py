"""What strangers' contributions are worth: losses before and after, on drawn sequences.

Each contribution is applied to the outer state by itself, as a small step, and the loss of the same
sequences is measured before and after. Beside it stands the *reference*, the mean of the trainers'
contributions. Three sets of sequences:

- those held back, and others drawn from all data: nobody knew the latter when it contributed. Both
  gains must be beyond noise, and not a small part of the reference's (lazy ones send little).
- the stranger's own: of those that it was assigned. It has seen them and the reference has not, so
  it gains more there than its gain elsewhere explains. A copy, and a trainer on other data, do not.

Paired by sequence: how hard a sequence is cancels out (Gauntlet, of Covenant-72B, arXiv 2603.08163,
compares means). The scorer draws once it holds the contributions, so nobody can foresee what is
measured: hashes alone could be tried until one draws sequences that suit."""

import math
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from itertools import chain, islice
from pathlib import Path
from statistics import median_low

import torch
from torch import Tensor

from peers.learning.mixture import Permutation, Place
from peers.learning.sharding import local, rest
from peers.learning.stored import slices_of
from peers.outer.learning import contribution
from peers.outer.learning.contribution import BadContribution, Contribution, pieces
from peers.outer.learning.replica import Replica
from peers.outer.learning.state import FILE, StateFile
from peers.outer.rating import clipped
from swarm.jobs.outer import Offered, Scored, ScoreRound
from swarm.wire.outer import SCORE_MAX
from swarm.world.progress import report

SEQUENCES = 32
"""Sequences of each set: a stranger costs five sets of forward passes."""

PROBE = 0.25
"""Share of a contribution that is applied: small, so that the slope is measured, not the noise of a
whole step, which the mean over all contributions takes out."""

LAZY, ENOUGH = 1 / 6, 1 / 2
"""Parts of the reference's gain: below the first a contribution counts as nothing, from the second
on as one of all inner steps. Honest ones gain about as much as the reference."""

SAMPLED, SAMPLE = 64, 1 << 12
"""Pieces that are compared to find copies, and values of each."""

COPY_COSINE = 0.8
"""Cosine, beyond what all have in common, from which a contribution is a copy of an earlier one.
Without that part independent trainers have 0.0 ± 0.2, also early, when all learn the same and their
whole contributions have 0.7 and more (measured with a tiny model). A copy with a tenth of noise has
0.98, one with half 0.67; what noise hides, its own sequences give away."""

COPY_COSINE_WHOLE = 0.9
"""The same of whole contributions, where one trainer alone shows nothing of what is common."""

COPY_REST = 0.5
"""A copy of the trainers' mean has less besides it than this share of what a trainer has."""

Direction = Sequence[tuple[Contribution, float]]
"""Contributions and their factors, which are added up."""


@torch.no_grad()
def score(replica: Replica, job: ScoreRound) -> list[Scored]:
    """Score the contributions of strangers; of copies the first in `job.strangers` counts.

    A file of `job.named` that cannot be read is left out; if none can, the result is empty."""
    own: dict[str, list[Place]] = {}
    strangers: dict[str, Direction] = {}
    problems: dict[str, str] = {}
    with ExitStack() as stack:

        def opened(folder: str) -> tuple[Contribution, float, Tensor]:
            path = Path(folder) / contribution.FILE
            file = stack.enter_context(Contribution(path, replica.shapes))
            return file, file.check(), _sample(file, job.draw)

        named = list[tuple[Contribution, float, Tensor]]()
        for folder in job.named:
            with suppress(BadContribution, OSError):
                named.append(opened(folder))
        if not named:
            return []
        typical = median_low([norm for _, norm, _ in named])
        copies = Copies([values for *_, values in named])
        reference = [
            (file, min(1.0, typical / norm) / len(named) if norm else 0.0)
            for file, norm, _ in named
        ]
        for each in job.strangers:
            try:
                file, norm, values = opened(each.folder)
            except (BadContribution, OSError) as error:
                problems[each.trainer] = str(error)
                continue
            if problem := copies.problem(values):
                problems[each.trainer] = problem
                continue
            strangers[each.trainer] = [(file, min(1.0, typical / norm) if norm else 0.0)]
            own[each.trainer] = _assigned(replica, each, job.draw)
        others = _others(replica, job.draw, list(chain(*own.values())))
        held = replica.held_back()
        held = [held[each] for each in islice(Permutation(len(held), job.draw), SEQUENCES)]
        state, general = StateFile(Path(job.state) / FILE), [*others, *held]
        places = [*general, *chain(*own.values())]
        before = _losses(replica, state, (), places)
        known, start = before - _losses(replica, state, reference, places), len(general)
        found: dict[str, tuple[float, float, float]] = {}
        for trainer, mine in own.items():
            index = [*range(len(general)), *range(start, start + len(mine))]
            start += len(mine)
            after = _losses(replica, state, strangers[trainer], [*general, *mine])
            found[trainer] = figures(before[index] - after, known[index], len(others), len(general))
    rest(replica.policy.scorer)
    scored = []
    for each in job.strangers:
        gain, more, share = found.get(each.trainer, (-math.inf, -math.inf, 0.0))
        why = problems.get(each.trainer, "")
        scored.append(Scored(each.trainer, clipped(gain), clipped(more), share, why))
    return scored


def _share(part: Tensor, whole: Tensor) -> float:
    return float(part.norm() / whole.norm()) if bool(whole.any()) else 1.0


class Copies:
    """Finds copies among samples of contributions, flat fp32, in the order in which they came;
    `named` are those of trainers."""

    def __init__(self, named: Sequence[Tensor]) -> None:
        mean = torch.stack(list(named)).mean(0)
        self._common = mean / mean.norm().clamp_min(1e-30) if len(named) > 1 else None
        self._most = COPY_COSINE if len(named) > 1 else COPY_COSINE_WHOLE
        self._seen = [self._rest(each) for each in named]
        self._least = 0.0
        if len(named) > 1:
            self._least = COPY_REST * min(map(_share, self._seen, named))

    def _rest(self, values: Tensor) -> Tensor:
        """What a contribution has besides its part along the mean."""
        return values if self._common is None else values - (values @ self._common) * self._common

    def problem(self, values: Tensor) -> str:
        """Why a contribution is a copy; empty: it is none, and the next are compared with it."""
        rest = self._rest(values)
        if _share(rest, values) < self._least:
            return "it is a copy of what the trainers have in common"
        alike = max(float(torch.cosine_similarity(rest, other, dim=0)) for other in self._seen)
        if alike > self._most:
            return (
                f"it is a copy: its cosine with one that came before it is {alike:.3f}, and those "
                f"of independent trainers stay below {self._most}"
            )
        self._seen.append(rest)
        return ""


def figures(
    gains: Tensor, reference: Tensor, others: int, general: int
) -> tuple[float, float, float]:
    """From a contribution's gains and the reference's, on sequences of all data, those held back,
    and its own, in that order, fp64 [n]: how far the loss of the first two falls, and how much more
    that of its own than this explains, in standard errors; and its gain over the reference's."""
    by_reference = float(reference[:general].mean())
    share = float(gains[:general].mean()) / by_reference if by_reference > 0 else 1.0
    parts = [each for each in (gains[:others], gains[others:general]) if len(each)]
    least = min(float(each.mean()) / (_error(each) or math.inf) for each in parts)
    extra = gains - share * reference
    error = math.hypot(_error(extra[general:]), _error(extra[:general])) or math.inf
    more = float(extra[general:].mean() - extra[:general].mean()) / error
    most = SCORE_MAX / 1000 * (share - LAZY) / (ENOUGH - LAZY)
    return min(least, most), more, share


def _error(values: Tensor) -> float:
    return float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else 0.0


def _assigned(replica: Replica, stranger: Offered, draw: bytes) -> list[Place]:
    """Some of the sequences that a stranger says it trained on, by its tokens."""
    count = max(1, stranger.tokens // replica.predicted(1))
    order = replica.order_of(stranger.seed)
    return [order[index] for index in islice(Permutation(count, draw), SEQUENCES)]


def _others(replica: Replica, draw: bytes, taken: Sequence[Place]) -> list[Place]:
    """Sequences drawn from all data, without those of which a stranger's share was drawn."""
    order, own = replica.order_of(int.from_bytes(draw[:7])), set(taken)
    drawn = (order[index] for index in range(2 * SEQUENCES))
    return list(islice((place for place in drawn if place not in own), SEQUENCES))


def _losses(
    replica: Replica, state: StateFile, direction: Direction, places: Sequence[Place]
) -> Tensor:
    """Losses of sequences by the weights of a state after a small step; fp64 [n]."""
    for name, parameter in replica.policy.trained().items():
        report()
        slices, into = slices_of(parameter), local(parameter)
        into.copy_(state.part(name, slices))
        for file, factor in direction:
            values = torch.cat([file.piece(name, each) for each in pieces(parameter.shape)])
            into.sub_(values.view(parameter.shape)[slices].to(into.device), alpha=PROBE * factor)
    return replica.losses(places)


def _sample(file: Contribution, draw: bytes) -> Tensor:
    """Values of a contribution at drawn places, flat fp32; the same places for equal draws."""
    cut = [(name, each) for name, shape in file.header.tensors for each in pieces(shape)]
    chosen = [cut[each] for each in islice(Permutation(len(cut), draw), SAMPLED)]
    return torch.cat([file.piece(name, each)[:SAMPLE] for name, each in chosen])
