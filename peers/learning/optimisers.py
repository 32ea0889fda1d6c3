"""AdamW, with its moments in fp32 or in 8 bits, and Muon.

Those in 8 bits take a step piece by piece: a piece's moments become fp32, torch's fused AdamW steps
them, and they are rounded again. So both compute the same formula."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import _muon as muon
from torch.optim.adamw import adamw

from peers.learning.sharding import local, whole
from peers.learning.stored import slices_of
from swarm.errors import UserError
from swarm.wire.manifest import Optimiser

PIECE = 1 << 23
"""Elements stepped at a time: 32 MiB of each moment. A multiple of `BLOCK`."""

BLOCK = 256
"""Elements that share one scale in 8 bits, as in bitsandbytes."""

QUANTISED_MIN = 4096
"""Tensors with fewer elements keep fp32 moments, as in bitsandbytes: they are norms and biases."""

EPSILON = 1e-8
"""AdamW's ε, torch's default."""

MUON_MOMENTUM = 0.95
MUON_STEPS = (muon.DEFAULT_A, muon.DEFAULT_B, muon.DEFAULT_C)
"""Coefficients of the Newton-Schulz iteration, torch's defaults."""

MOMENTS = {"exp_avg": True, "exp_avg_sq": False}
"""AdamW's moments, and whether each is signed."""

State = dict[str, Tensor]
"""One parameter's tensors: `step`, and each moment or what stands for it."""


class QuantisedMoments:
    """Moments in 8 bits with a scale per block (Dettmers et al. 2021, 2110.02861), by torchao.

    torchao's own AdamW is not used: it compiles a program for each shape, and its states are a
    class of tensors that cannot be written as safetensors."""

    def __init__(self) -> None:
        """Raises `UserError` where torchao is missing."""
        try:
            from torchao.optim import quant_utils
        except ImportError as error:
            raise UserError(
                "trainer.optimiser is adamw8bit, which needs torchao; type: pip install "
                "'swarm-rl[adamw8bit]'"
            ) from error
        self._torchao: Any = quant_utils
        self._maps: dict[tuple[str, torch.device], Tensor] = {}

    def begin(self, parameter: Tensor) -> State:
        part = local(parameter).detach()
        if part.numel() < QUANTISED_MIN or part.numel() % BLOCK:
            return {moment: torch.zeros_like(parameter) for moment in MOMENTS}
        state = {}
        for moment in MOMENTS:
            state[f"{moment}.codes"] = torch.zeros_like(part, dtype=torch.uint8)
            state[f"{moment}.scales"] = torch.zeros(part.numel() // BLOCK, device=part.device)
        return state

    def read(self, state: State, moment: str, piece: slice, device: torch.device) -> Tensor:
        if moment in state:
            return local(state[moment]).view(-1)[piece]
        codes, scales = self._pieces(state, moment, piece)
        value: Tensor = self._torchao.dequant_with_qmap(codes, self._map(moment, device), scales)
        return value

    def write(self, state: State, moment: str, piece: slice, value: Tensor) -> None:
        if moment in state:
            return  # it was stepped where it is kept
        codes, scales = self._pieces(state, moment, piece)
        new_codes, new_scales = self._quantise(moment, value)
        codes.copy_(new_codes)
        scales.copy_(new_scales)

    def _quantise(self, moment: str, value: Tensor) -> tuple[Tensor, Tensor]:
        scaled, scales = self._torchao.scale_tensor(value, BLOCK)
        map_ = self._map(moment, value.device)
        return self._torchao.quantize_8bit_with_qmap(scaled, map_), scales

    def _pieces(self, state: State, moment: str, piece: slice) -> tuple[Tensor, Tensor]:
        blocks = slice(piece.start // BLOCK, piece.stop // BLOCK)
        return state[f"{moment}.codes"].view(-1)[piece], state[f"{moment}.scales"][blocks]

    def _map(self, moment: str, device: torch.device) -> Tensor:
        """The 256 values of a moment's codes, ascending."""
        key = (moment, device)
        if key not in self._maps:
            values = self._torchao.create_dynamic_map(signed=MOMENTS[moment])
            self._maps[key] = torch.tensor(values, device=device)
        return self._maps[key]


class PiecewiseAdamW(torch.optim.Optimizer):
    """AdamW whose moments are kept in 8 bits."""

    def __init__(self, parameters: Iterable[Tensor], **numbers: Any) -> None:
        self.memory = QuantisedMoments()
        super().__init__(parameters, numbers)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, group)

    def _step(self, parameter: Tensor, numbers: dict[str, Any]) -> None:
        state: State = self.state[parameter]
        part = local(parameter)
        if not state:
            state["step"] = torch.zeros((), device=part.device)
            state.update(self.memory.begin(parameter))
        assert parameter.grad is not None
        weights, gradients = part.view(-1), local(parameter.grad).reshape(-1)
        for piece in _pieces(part.numel()):
            moments = [self.memory.read(state, moment, piece, part.device) for moment in MOMENTS]
            count = state["step"].clone()  # each piece would count it
            _adamw([weights[piece], gradients[piece], count, *moments], numbers)
            for moment, value in zip(MOMENTS, moments, strict=True):
                self.memory.write(state, moment, piece, value)
        state["step"] += 1


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of the layers, AdamW for all else, at AdamW's learning rates.

    A matrix moves by its momentum, orthogonalised (Jordan et al. 2024) and scaled to the size of
    AdamW's updates (Liu et al. 2025, 2502.16982, eq. 4): torch's `Muon` with `match_rms_adamw`. Of
    a divided matrix every rank gathers the whole update, and keeps its own part of the momentum."""

    def __init__(self, parameters: Iterable[Tensor], apart: Sequence[Tensor], **numbers: Any):
        given = list(parameters)
        left = {id(each) for each in apart}
        matrices = [each for each in given if each.ndim == 2 and id(each) not in left]
        left = {id(each) for each in given} - {id(each) for each in matrices}
        groups: list[dict[str, Any]] = [
            {"params": matrices, "matrices": True},
            {"params": [each for each in given if id(each) in left]},
        ]
        super().__init__(groups, {"matrices": False, **numbers})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state: State = self.state[parameter]
                if not state:
                    state.update(begin_state(self, parameter))
                if group["matrices"]:
                    self._turn(parameter, state["momentum"], group)
                else:
                    values = [local(parameter), local(parameter.grad), *map(local, state.values())]
                    _adamw(values, group)

    def _turn(self, parameter: Tensor, momentum: Tensor, numbers: dict[str, Any]) -> None:
        assert parameter.grad is not None
        momentum.lerp_(parameter.grad, 1 - MUON_MOMENTUM)
        nesterov = whole(parameter.grad.lerp(momentum, MUON_MOMENTUM))
        update = muon._zeropower_via_newtonschulz(nesterov, MUON_STEPS, 5, muon.EPS)
        size = 0.2 * math.sqrt(max(parameter.shape)) * numbers["lr"]
        part = local(parameter)
        part.mul_(1 - numbers["lr"] * numbers["weight_decay"])
        part.add_(update[slices_of(parameter)], alpha=-size)


def _adamw(values: Sequence[Tensor], numbers: dict[str, Any]) -> None:
    """Step a parameter: its values, gradient, step and moments; the step is counted."""
    weights, gradient, step, *moments = values
    beta1, beta2 = numbers["betas"]
    adamw(
        [weights],
        [gradient],
        [moments[0]],
        [moments[1]],
        [],
        [step],
        fused=True,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=numbers["lr"],
        weight_decay=numbers["weight_decay"],
        eps=EPSILON,
        maximize=False,
    )


def _pieces(count: int) -> Iterator[slice]:
    for start in range(0, count, PIECE):
        yield slice(start, min(count, start + PIECE))


def make_optimiser(
    name: str, parameters: Iterable[Tensor], numbers: Optimiser, apart: Sequence[Tensor] = ()
) -> torch.optim.Optimizer:
    """The settings' optimiser; raises `UserError`. `apart`: what Muon leaves: embedding, head."""
    chosen: dict[str, Any] = {
        "lr": numbers.learning_rate,
        "betas": (numbers.beta1, numbers.beta2),
        "weight_decay": numbers.weight_decay,
    }
    if name == "adamw8bit":
        return PiecewiseAdamW(parameters, **chosen)
    if name == "muon":
        return Muon(parameters, apart, **chosen)
    groups = [{"params": group} for group in by_mesh(parameters)]
    return torch.optim.AdamW(groups, **chosen, eps=EPSILON, fused=True)


def begin_state(optimiser: torch.optim.Optimizer, parameter: Tensor) -> State:
    """The state that the optimiser's first step would make for a parameter, of zeros."""
    step = torch.zeros((), device=local(parameter).device)
    matrices = optimiser.param_groups[0]
    if matrices.get("matrices") and any(parameter is each for each in matrices["params"]):
        return {"momentum": torch.zeros_like(parameter)}
    if isinstance(optimiser, PiecewiseAdamW):
        return {"step": step, **optimiser.memory.begin(parameter)}
    return {"step": step, **{moment: torch.zeros_like(parameter) for moment in MOMENTS}}


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by the ranks that divide them: torch's fused operations take one mesh."""
    found: dict[Any, list[Tensor]] = {}
    for tensor in tensors:
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        found.setdefault(mesh, []).append(tensor)
    return list(found.values())


def clip_gradients(parameters: Iterable[Tensor], norm_max: float) -> Tensor:
    """Clip the gradients' norm to `norm_max`, as torch's `clip_grad_norm_`; return the old norm."""
    parameters = list(parameters)
    groups = by_mesh([each.grad for each in parameters if each.grad is not None])
    if len(groups) < 2:
        return whole(torch.nn.utils.clip_grad_norm_(parameters, norm_max))
    norms = [whole(torch.nn.utils.get_total_norm(group)) for group in groups]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    scale = (norm_max / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_([local(each) for group in groups for each in group], scale)
    return norm
