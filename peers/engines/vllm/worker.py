"""What runs inside vLLM's workers: seeded sampling, and the record of what was sampled from.

vLLM keeps one row per request in its batch. `SeededSampling` follows the rows by vLLM's own
announcements of changes, and a hook before the head gives it the hidden states of the same rows.
A request that vLLM computes again, after it preempted it or reset its cache, resumes at the
position it had reached; a row whose prompt is not complete yet is recorded again at its position.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from peers.engines.noise import gumbel_noise

ARGUMENT = "swarm"
"""Name of `extra_args` under which a request carries `Sampled`'s first five fields."""

Taken = tuple[int, int, bytes, bytes]
"""Serial, tokens, bytes of hidden (bf16) and log-probabilities (fp32), for other processes."""


@dataclass
class Sampled:
    """One request's sampling, and its record so far."""

    serial: int
    key: tuple[int, int] | None
    row: int
    start: int
    temperature: float
    output: list[int] = field(default_factory=list)
    """vLLM's own list of the tokens sampled, which it extends after each step."""
    hidden: Tensor = field(default_factory=lambda: torch.empty(0))
    """bf16 [capacity, hidden] on the CPU."""
    log_probabilities: list[float] = field(default_factory=list)

    def put(self, index: int, hidden: Tensor, log_probability: float) -> None:
        """Record the token at `index`, again if it was recorded before."""
        if index >= len(self.hidden):
            larger = torch.empty(max(64, 2 * index), len(hidden), dtype=torch.bfloat16)
            if index > 0:
                larger[:index] = self.hidden[:index]
            self.hidden = larger
        self.hidden[index] = hidden
        del self.log_probabilities[index:]
        self.log_probabilities.append(log_probability)


class SeededSampling(LogitsProcessor):  # type: ignore[misc]
    """Adds the seed's Gumbel noise to logits / T; vLLM then takes the largest.

    Records each row's hidden state and log-probability without noise."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._rows: dict[int, Sampled] = {}
        """By row of vLLM's batch."""
        self._records: dict[int, Sampled] = {}
        """By serial; kept until taken."""
        self._unwritten: tuple[list[tuple[Sampled, int]], Tensor, Tensor] | None = None
        """The last step's rows and positions, hidden states and log-probabilities."""
        self.hidden: Tensor | None = None
        """[rows, hidden] The states from which the next logits are computed."""

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._rows.pop(index, None)
        for index, params, _, output in batch_update.added:
            self._rows[index] = self._record(params, output)
        for one, other, direction in batch_update.moved:
            moved, replaced = self._rows.pop(one, None), self._rows.pop(other, None)
            if moved is not None:
                self._rows[other] = moved
            if replaced is not None and direction == MoveDirectionality.SWAP:
                self._rows[one] = replaced

    def _record(self, params: SamplingParams, output: list[int]) -> Sampled:
        serial, key, row, start, temperature = params.extra_args[ARGUMENT]
        record = self._records.get(serial)
        if record is None:
            key = None if key is None else tuple(key)
            record = Sampled(serial, key, row, start, temperature)
            self._records[serial] = record
        record.output = output
        return record

    def apply(self, logits: Tensor) -> Tensor:
        self._write()
        rows = [self._rows[index] for index in range(len(logits))]
        assert self.hidden is not None and len(self.hidden) == len(logits)
        log_mu = torch.empty(len(logits), device=logits.device)
        kinds: dict[tuple[tuple[int, int] | None, float], list[int]] = {}
        for index, row in enumerate(rows):
            kinds.setdefault((row.key, row.temperature), []).append(index)
        for (key, temperature), indices in kinds.items():
            some = [rows[index] for index in indices]
            part = slice(None) if len(kinds) == 1 else torch.tensor(indices, device=logits.device)
            logits[part], log_mu[part] = _perturb(logits[part], some, key, temperature)
        at = [(row, len(row.output)) for row in rows]
        # On a GPU the copies run beside the next step; `_write` reads them one step later, when
        # vLLM has waited for this step's tokens.
        hidden = self.hidden.to(torch.bfloat16).to("cpu", non_blocking=True)
        self._unwritten = at, hidden, log_mu.to("cpu", non_blocking=True)
        self.hidden = None
        return logits

    def sampled_counts(self) -> dict[int, int]:
        """The tokens sampled so far, by serial."""
        return {serial: len(record.output) for serial, record in self._records.items()}

    def take(self, serials: Sequence[int]) -> list[Taken]:
        """Remove and return the records of requests that ended."""
        if self._unwritten is not None and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._write()
        taken: list[Taken] = []
        for serial in serials:
            record = self._records.pop(serial, None)
            if record is None:
                continue
            count = len(record.log_probabilities)
            log_mu = torch.tensor(record.log_probabilities, dtype=torch.float32)
            taken.append((serial, count, _raw(record.hidden[:count]), _raw(log_mu)))
        return taken

    @torch.inference_mode()  # as vLLM calls `apply`
    def _write(self) -> None:
        if self._unwritten is None:
            return
        at, hidden, log_mu = self._unwritten
        self._unwritten = None
        for (record, index), state, value in zip(at, hidden, log_mu.tolist(), strict=True):
            record.put(index, state, value)


def _perturb(
    logits: Tensor, rows: Sequence[Sampled], key: tuple[int, int] | None, temperature: float
) -> tuple[Tensor, Tensor]:
    """What vLLM takes the largest of [rows, vocabulary], and log μ of that token [rows]."""
    scaled = logits / temperature
    perturbed = logits
    if key is not None:
        row = torch.tensor([each.row for each in rows], device=logits.device)
        position = [each.start + len(each.output) for each in rows]
        at = torch.tensor(position, device=logits.device)
        perturbed = scaled + gumbel_noise(key, row, at, logits.shape[-1])
    chosen = perturbed.argmax(-1, keepdim=True)
    return perturbed, torch.log_softmax(scaled, -1).gather(-1, chosen)[:, 0]


def _raw(values: Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()


class WorkerExtension:
    """Methods that Swarm adds to each worker of vLLM, called with `collective_rpc`."""

    model_runner: Any

    def swarm_install(self) -> bool:
        """Hook the head; returns whether this worker samples (the last stage of a pipeline).

        From now on weights are read from files."""
        self.model_runner.vllm_config.load_config.load_format = "safetensors"
        head = getattr(self.model_runner.model, "logits_processor", None)
        sampling = self._sampling()
        if not isinstance(head, nn.Module) or sampling is None:
            return False

        def keep(module: nn.Module, arguments: tuple[Any, ...]) -> None:
            sampling.hidden = arguments[1]

        head.register_forward_pre_hook(keep)
        return True

    def swarm_take(self, serials: list[int]) -> list[Taken]:
        sampling = self._sampling()
        return [] if sampling is None else sampling.take(serials)

    def swarm_counts(self) -> dict[int, int]:
        sampling = self._sampling()
        return {} if sampling is None else sampling.sampled_counts()

    def swarm_repair_head(self) -> None:
        """Repack a reloaded tied head, of which a CPU's vLLM keeps a packed copy of its own."""
        head = getattr(self.model_runner.model, "lm_head", None)
        method = getattr(head, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(head)

    def _sampling(self) -> SeededSampling | None:
        for each in self.model_runner.input_batch.logitsprocs.all:
            if isinstance(each, SeededSampling):
                return each
        return None
