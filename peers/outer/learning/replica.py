"""The inner learner: one trainer's copy of the model, which takes the inner steps of a round.

A round begins from the outer state's weights. The inner optimiser's moments stay with the trainer
from round to round. The pseudo-gradient is the difference of the weights before and after; what its
compression left out of the last one is added to it first."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from peers.learning import states
from peers.learning.descent import descend
from peers.learning.durable import whole_folder
from peers.learning.mixture import Mixture, Place, shares
from peers.learning.packing import Rows
from peers.learning.policy import TrainedPolicy, blank_model
from peers.learning.ranks import Ranks
from peers.learning.settings import LearnerSettings, learning_rate
from peers.learning.sharding import local, rest, whole
from peers.learning.stored import slices_of
from peers.outer.learning import contribution
from peers.outer.learning.contribution import VALUE_MAX, Header
from peers.outer.learning.corpus import TextBlocks
from peers.outer.learning.state import StateFile
from peers.outer.learning.tensor_file import Shapes, TensorFile, TensorFileWriter
from swarm.errors import UserError
from swarm.jobs.outer import Inner, StartReplica
from swarm.wire.manifest import Objective, Schedule
from swarm.world.progress import checkpoint, report

_FEEDBACK = "feedback.safetensors"
_FEEDBACK_FORMAT = "swarm-outer-feedback-1"
_OPTIMISER = "optimiser"

MEASURED_SEQUENCES = 64
"""Sequences of one batch when sequences held back are measured."""


class Replica:
    """Holds this rank's part of the model, its optimiser, and the data."""

    def __init__(self, job: StartReplica, ranks: Ranks, corpus: TextBlocks | None = None) -> None:
        """Load model and data; raises `UserError`. `corpus`: data that was read before."""
        self._job = job
        self._ranks = ranks
        inner: Inner = job.inner
        self._inner = inner
        settings = LearnerSettings(
            objective=Objective(),
            schedule=Schedule(),
            seed=job.seed,
            optimiser=inner.optimiser,
            sharding=job.sharding,
            attention=None if job.attention == "fastest" else job.attention,
        )
        base = Path(job.model)
        self._corpus = corpus or TextBlocks(inner, base)
        self._sizes, self._mixture = self._divide()
        self._left: Path | None = None
        """The folder of the inner state that the moments in memory are those of."""
        self.policy = TrainedPolicy(blank_model(base, settings, ranks), base, settings, ranks)

    def _divide(self) -> tuple[list[int], Mixture]:
        """Sequences to train on of each source, and their order; those behind are held back."""
        job, inner, sizes = self._job, self._inner, self._corpus.sizes
        trainers = sorted(job.trainers) or [job.trainer]
        if job.trainer not in trainers:
            raise UserError(
                f"trainer is {job.trainer}, which is not among the run's {len(trainers)} trainers; "
                "ask the run's owner to add it"
            )
        held_back = shares(inner.weights, len(sizes), inner.validation_sequences)
        for size, held in zip(sizes, held_back, strict=True):
            if held >= size:
                raise UserError(
                    f"validation_sequences is {inner.validation_sequences}, but the data has "
                    f"{size} sequences for {held} of them; hold back fewer"
                )
        left = [size - held for size, held in zip(sizes, held_back, strict=True)]
        number = trainers.index(job.trainer)
        return left, Mixture(left, job.seed, inner.weights, number, len(trainers))

    @property
    def sequences(self) -> int:
        """Sequences to train on."""
        return sum(self._sizes)

    @property
    def data(self) -> str:
        """What the data hold (`TextBlocks.identity`)."""
        return self._corpus.identity

    @property
    def shapes(self) -> Shapes:
        """Shapes of the trained parameters by name."""
        trained = self.policy.trained()
        return {name: tuple(trained[name].shape) for name in sorted(trained)}

    # --- a round -----------------------------------------------------------------------------

    def begin(self, state: StateFile, inner_before: Path | None) -> None:
        """Take the weights of an outer state, and the inner state of the round before, if any.

        Raises `UserError` if they do not fit the model."""
        if dict(state.shapes) != dict(self.shapes):
            raise UserError(f"{state.path} is an outer state of another model than this one")
        self._assign(state)
        left, self._left = self._left, None
        if inner_before is not None and inner_before == left:
            return  # the moments are still as they were written there
        self.policy.optimiser.state.clear()
        if inner_before is not None:
            folder = inner_before / _OPTIMISER
            self.policy.make_optimiser_state([*states.shapes(folder), *self._weights()], folder)
            states.read(folder, self._moments(), self._ranks)

    @torch.no_grad()
    def _assign(self, state: StateFile) -> None:
        for name, parameter in self.policy.trained().items():
            report()
            local(parameter).copy_(state.part(name, slices_of(parameter)))

    def order_of(self, seed: int) -> Mixture:
        """The order in which a stranger learns the sequences in one round, from position 0 on."""
        return Mixture(self._sizes, seed, self._inner.weights)

    def steps(self, round_: int, seed: int | None = None) -> Iterator[dict[str, float]]:
        """Take the inner steps of a round, counted from 1, one at a time; the figures of each, with
        its loss in nats per predicted token. `seed`: of a stranger's order of the data."""
        count = self._job.inner_steps
        begin = (round_ - 1) * count
        for step in range(begin, begin + count):
            if self._ranks.world == 1:
                checkpoint()  # a round that has become useless is cancelled; ranks stay together
            order, at = self._mixture, step
            if seed is not None:
                order, at = self.order_of(seed), step - begin
            places = order.batch(at, self._inner.batch_sequences)
            yield self._step(places, self._rate(step))

    def _rate(self, step: int) -> float:
        return learning_rate(self._inner.optimiser, self._job.rounds * self._job.inner_steps, step)

    def _step(self, places: Sequence[Place], rate: float) -> dict[str, float]:
        tokens = self.predicted(len(places))
        self.policy.optimiser.zero_grad()
        total = torch.zeros((), device=self._ranks.device)
        for rows in self._passes(places):
            surprise, penalty = self._loss(rows)
            loss = (surprise + penalty) / tokens
            # Each rank's loss is its share of the batch's; FSDP averages the gradients.
            (loss * self._ranks.parts).backward()  # type: ignore[no-untyped-call]
            total += surprise.detach()
        norm_max = self._inner.optimiser.gradient_norm_max
        return descend(self.policy, {"loss": total / tokens}, norm_max, rate)

    def predicted(self, sequences: int) -> int:
        """Tokens of so many sequences that are predicted: all but the first of each."""
        return sequences * (self._inner.sequence_tokens - 1)

    def _passes(self, places: Sequence[Place]) -> list[Rows]:
        """The forward passes over this rank's share of some sequences."""
        share = self._ranks.share([self._inner.sequence_tokens] * len(places))
        return self.policy.passes(self._corpus.batch([places[index] for index in share]))

    def _loss(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """The sums over a pass of the negative log-probabilities and of the max-z-loss."""
        report()
        weight = self._inner.z_loss
        log_pi, largest = self.policy.scorer(
            rows, entropy=False, largest_logit=bool(weight)
        )  # fp32 [k] each
        return -log_pi.sum(), weight * largest.square().sum()

    def held_back(self) -> list[Place]:
        """The sequences that nobody trains on."""
        return [
            (source, index)
            for source, size in enumerate(self._corpus.sizes)
            for index in range(self._sizes[source], size)
        ]

    @torch.no_grad()
    def losses(self, places: Sequence[Place]) -> Tensor:
        """Loss of each sequence with the weights as they are, in nats per predicted token; fp64."""
        found = [0.0] * len(places)
        for start in range(0, len(places), MEASURED_SEQUENCES):
            if self._ranks.world == 1:
                checkpoint()
            some = places[start : start + MEASURED_SEQUENCES]
            mine = self._ranks.share([self._inner.sequence_tokens] * len(some))
            batch = self._corpus.batch([some[index] for index in mine])
            values = torch.zeros(self.predicted(len(mine)), dtype=torch.float64)
            for rows in self.policy.passes(batch):
                report()
                log_pi = self.policy.scorer(rows, entropy=False)[0]
                values[rows.index.cpu()] = -log_pi.double().cpu()
            each = values.view(len(mine), self.predicted(1)).mean(1).tolist()
            for index, loss in zip(mine, each, strict=True):
                found[start + index] = loss
        return torch.tensor(self._ranks.sum(found), dtype=torch.float64)

    @torch.no_grad()
    def measure(self, state: StateFile) -> float | None:
        """Loss of an outer state on the sequences held back; None if there are none."""
        held_back = self.held_back()
        if not held_back:
            return None
        self._assign(state)
        total, tokens = 0.0, 0
        for start in range(0, len(held_back), MEASURED_SEQUENCES):
            places = held_back[start : start + MEASURED_SEQUENCES]
            tokens += self.predicted(len(places))
            for rows in self._passes(places):
                total += float(self._loss(rows)[0])
        rest(self.policy.scorer)
        return self._ranks.sum([total])[0] / tokens

    # --- what a round leaves -----------------------------------------------------------------

    def write(self, state: StateFile, before: Path | None, after: Path, to: Path) -> None:
        """Write the contribution to the folder `to`, and the inner state to the folder `after`.

        `state` and `before` are those that the round began with. Raises `UserError` if a weight is
        not finite or has moved too far."""
        keeps_rest = self._job.compression != "fp32"
        with whole_folder(to, self._ranks) as folder, whole_folder(after, self._ranks) as aside:
            states.write(aside / _OPTIMISER, self._moments(), {}, self._ranks)
            if self._ranks.rank == 0:
                kept = _Feedback(before, aside, self.shapes) if keeps_rest else None
                self._write_contribution(state, kept, folder)
            else:
                for name in self.shapes:
                    whole(self.policy.trained()[name].detach())
        self._left = after

    @torch.no_grad()
    def _write_contribution(self, state: StateFile, kept: "_Feedback | None", folder: Path) -> None:
        trained = self.policy.trained()
        current, full = "", torch.empty(0)

        def piece_of(name: str, piece: slice) -> Tensor:
            nonlocal current, full
            if name != current:
                current, full = name, whole(trained[name].detach()).cpu().reshape(-1)
            values = state.weight(name, piece) - full[piece]
            if kept is not None:
                values += kept.before(name, piece)
            largest = float(values.abs().max())
            if not largest <= VALUE_MAX:  # nor NaN
                raise UserError(
                    f"the inner steps moved a weight of {name} by {largest:g}; the most is "
                    f"{VALUE_MAX:g}: lower the learning rate"
                )
            return values

        keep: Callable[[str, slice, Tensor], None] = kept.keep if kept else lambda *_: None
        shards = self._job.shards
        for shard in range(shards):
            header = Header(self._job.compression, list(self.shapes.items()), shard, shards)
            path = contribution.place(folder, shard, shards)
            path.parent.mkdir(exist_ok=True)
            contribution.write(path, header, piece_of, keep)
        if kept is not None:
            kept.finish()

    def _moments(self) -> dict[str, Tensor]:
        weights = set(self._weights())
        return {name: each for name, each in self.policy.state().items() if name not in weights}

    def _weights(self) -> list[str]:
        return [f"model.{name}" for name in self.policy.trained()]


class _Feedback:
    """What compression left out of the pseudo-gradients so far."""

    def __init__(self, before: Path | None, after: Path, shapes: Shapes) -> None:
        """`before` and `after`: folders of the inner state."""
        self._before = TensorFile(before / _FEEDBACK, _FEEDBACK_FORMAT) if before else None
        self._after = TensorFileWriter(after / _FEEDBACK, _FEEDBACK_FORMAT, shapes)

    def before(self, name: str, piece: slice) -> Tensor:
        if self._before is None:
            return torch.zeros(piece.stop - piece.start)
        return self._before.piece(name, piece)

    def keep(self, name: str, piece: slice, rest: Tensor) -> None:
        self._after.write(name, piece, rest)

    def finish(self) -> None:
        self._after.finish()
