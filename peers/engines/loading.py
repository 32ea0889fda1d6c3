"""transformers' model of a folder: with its weights, blank, or drawn at random.

For the trainer and the general engine; the native engine reads weights by itself. None of these
runs code from the folder or uses the network."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peers.engines.adapter_config import base_of, is_adapter
from peers.engines.config import first_line, read_text_config
from peers.engines.device import available_bytes
from peers.engines.model import STORED, open_weights, read_adapter, weight_files
from peers.engines.tokenizer import check_tokenizer, tokenizer_files
from swarm.errors import UserError
from swarm.terminal.figures import readable_bytes

TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}
"""Largest mean difference, in nats, between a token's log-probability computed in two ways. A wrong
attention mask or position changes it by several nats; rounding in 16 bits by some hundredths."""


def load(folder: Path, dtype: torch.dtype | None = None) -> Any:
    """A folder's causal model, in `dtype` (None: as stored), on the CPU; raises `UserError`."""
    _check_trainable(folder)
    weight_files(folder)
    return load_policy(folder, dtype)


def load_policy(folder: Path, dtype: torch.dtype | None = None) -> Any:
    """As `load`, of a policy: an adapter is merged into its base, and no tokenizer is needed.

    Raises `UserError`, also where tensors are missing: transformers would make them up."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # it would fill the kept end of a child's stderr
    read_text_config(folder)
    base = base_of(folder)
    read_text_config(base)
    open_weights(base, stored=STORED | {"I64"})  # some families hold tables of indices
    try:
        shapes = _on_meta(base, dtype)
        _check_room([*shapes.parameters(), *shapes.buffers()], base)
        model, said = type(shapes).from_pretrained(
            base,
            dtype=dtype or "auto",
            use_safetensors=True,
            output_loading_info=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except UserError:
        raise
    except Exception as error:  # a config's values reach all of transformers
        raise UserError(
            f"model {folder} cannot be loaded by transformers ({first_line(error)})"
        ) from error
    missing = sorted(said["missing_keys"])
    if missing:
        raise UserError(
            f"the weights in {base} lack {missing[0]}"
            + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
            + ", which a model with this config.json has; get the whole model again"
        )
    if model.dtype not in TOLERANCES:
        raise UserError(
            f"model {folder} is stored as {str(model.dtype).removeprefix('torch.')}; set dtype to "
            "float32, bfloat16 or float16"
        )
    if caps_scores(model.config):
        model.set_attn_implementation("eager")
    _merge_adapter(model, folder)
    return model


def blank(folder: Path, dtype: torch.dtype) -> Any:
    """The model of `folder` on the device `meta`, its buffers on the CPU; raises `UserError`."""
    _check_trainable(folder)
    model = _on_meta(folder, None, dtype)
    _check_room([*model.buffers()], folder)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
    try:
        body_of(model), model.get_decoder(), model.get_output_embeddings().weight
        for module in model.modules():
            model._init_weights(module)  # a family may fill a layer's buffers from its body
    except AttributeError as error:
        raise UserError(
            f"models of the family {model.config.model_type} cannot be trained here "
            f"({first_line(error)})"
        ) from error
    _read_buffers(model, folder)
    return model


def stored_buffers(model: Any) -> dict[str, Tensor]:
    """The buffers that belong to a model's checkpoint, by name, such as biases of experts."""
    learnt = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {name: value for name, value in model.state_dict().items() if name not in learnt}


def _read_buffers(model: Any, folder: Path) -> None:
    wanted = stored_buffers(model)
    if not any(folder.glob("*.safetensors")):  # only the shapes are asked for
        return
    files, shapes = open_weights(folder, stored=STORED | {"I64"})
    names = {parameter: name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        both = [each for each in (names[parameter], name) if each in files]
        if len(set(both)) == 2 and not torch.equal(
            *(files[each].get_tensor(each) for each in both)
        ):
            raise UserError(
                f"{folder} holds {both[0]} and another {name}, which its config.json makes one "
                "(tie_word_embeddings); set that to false"
            )
    for name, buffer in wanted.items():
        (stored,) = published(model, {name: buffer})
        if shapes.get(stored) != tuple(buffer.shape):
            raise UserError(
                f"{folder} holds another model than its config.json: {stored} has shape "
                f"{shapes.get(stored)}, not {tuple(buffer.shape)}"
            )
        parent, _, own = name.rpartition(".")
        model.get_submodule(parent)._buffers[own] = files[stored].get_tensor(stored)


def random(folder: Path, seed: int) -> Any:
    """The model of `folder`/config.json with weights drawn from `seed`; raises `UserError`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    _check_trainable(folder)
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32)


def caps_scores(config: Any) -> bool:
    """Whether a model caps its attention scores, which transformers' sdpa leaves out."""
    return getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None


def body_of(model: Any) -> Any:
    """All of a model but its head."""
    return getattr(model, model.base_model_prefix)


def decoder_layers(model: Any) -> torch.nn.ModuleList:
    """The layers of a model's text part, in order; raises `UserError` if it has no such list."""
    count = model.config.get_text_config().num_hidden_layers
    for module in model.get_decoder().modules():
        for each in module.children():
            if isinstance(each, torch.nn.ModuleList) and len(each) == count:
                return each
    raise UserError(
        f"models of the family {model.config.model_type} have no list of {count} layers, so they "
        "cannot be trained here"
    )


def freeze_all_but_text(model: Any) -> None:
    """Freeze the parts of a model that text does not pass: those for images and sounds."""
    text = (model.get_decoder(), model.get_output_embeddings())
    trained = {id(parameter) for part in text for parameter in part.parameters()}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)


def published(model: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Some of a model's parameters as checkpoints of its family hold them: experts one by one."""
    from transformers.core_model_loading import revert_weight_conversion

    found: dict[str, Tensor] = revert_weight_conversion(model, dict(weights))
    return found


def published_owners(model: Any, owners: Mapping[str, int]) -> dict[str, int]:
    """The rank that writes each tensor of `published`; `owners`: that of each parameter."""
    blank = {
        name: torch.empty(value.shape, device="meta") for name, value in model.state_dict().items()
    }
    return {
        each: owner
        for owner in set(owners.values())
        for each in published(
            model, {name: blank[name] for name in owners if owners[name] == owner}
        )
    }


def _check_trainable(folder: Path) -> None:
    """Raise `UserError` for an adapter, and for a folder without its tokenizer."""
    if is_adapter(folder):
        raise UserError(f"{folder} holds an adapter, not a whole model; merge it into its base")
    check_tokenizer(folder, read_text_config(folder)["vocab_size"])
    tokenizer_files(folder)  # not only when the trained policy is saved


def _on_meta(folder: Path, dtype: torch.dtype | None, default: Any = torch.float32) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        # With its eyes, which a policy is published with, where there is a class that has them.
        sees = type(config) in AutoModelForImageTextToText._model_mapping
        family = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        with torch.device("meta"):
            return family.from_config(config, dtype=dtype or config.dtype or default)
    except Exception as error:  # a config's values reach all of transformers
        raise UserError(
            f"model {folder} cannot be loaded by transformers ({first_line(error)})"
        ) from error


def _check_room(tensors: list[Tensor], folder: Path) -> None:
    """Raise `UserError` for a model whose tensors are larger than the free memory."""
    needed = sum(each.nbytes for each in tensors)
    free = available_bytes(torch.device("cpu"))
    if needed > free:
        raise UserError(
            f"model {folder} takes {readable_bytes(needed)} of memory, and {readable_bytes(free)} "
            "are free; choose a smaller model, or a larger machine"
        )


@torch.no_grad()
def _merge_adapter(model: Any, folder: Path) -> None:
    parameters = dict(model.named_parameters())
    adapter = read_adapter(folder, {name: tuple(p.shape) for name, p in parameters.items()})
    if adapter is not None:
        for name, parameter in parameters.items():
            parameter.copy_(adapter.merged(name, parameter))


class Head:
    """Computes a model's logits of given hidden states, with the weights that its head has then.

    The model's own forward pass runs with a stand-in for its body, so that whatever a family does
    after its head (scales, caps, biases) is done as in transformers."""

    def __init__(self, model: Any, change: Callable[[nn.Module], nn.Module] | None = None) -> None:
        """`change` makes the head's module, which computes the product, from the model's own.

        Raises `AttributeError` for a model whose body or head cannot be told apart."""
        self._given = _Given(body_of(model))
        self._model: Any = copy.copy(model)
        self._model._modules = dict(model._modules)
        self._model._modules[model.base_model_prefix] = self._given
        output = model.get_output_embeddings()
        for name, module in model._modules.items():
            if module is output and module is not None and change is not None:
                self._model._modules[name] = change(module)

    def __call__(self, states: Tensor) -> Tensor:
        """Hidden states [n, hidden] → logits, fp32 [n, vocabulary]; raises `UserError`."""
        self._given.states = states[None]
        blank = torch.zeros(1, len(states), dtype=torch.int64, device=states.device)
        found: Tensor = self._model(input_ids=blank, use_cache=False).logits[0].float()
        if self._given.states is not None:
            raise UserError(
                f"models of the family {self._model.config.model_type} compute logits of other "
                "states than their body's, so they can be neither checked nor trained here"
            )
        return found


class _Output:
    """What a body returns: its states, and None for all else that a family may look for."""

    def __init__(self, states: Tensor | None) -> None:
        self.last_hidden_state = states

    def __getitem__(self, index: int) -> Tensor | None:
        return self.last_hidden_state if index == 0 else None

    def __getattr__(self, name: str) -> None:
        return None


class _Given(nn.Module):
    """Stands in for a model's body and returns hidden states that were computed before."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self._body = (body,)
        """In a tuple, so that it is no part of this module."""
        self.states: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        """What the model reads of its body: multipliers of its head, for example."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._body[0], name)

    def forward(self, *_arguments: Any, **_named: Any) -> Any:
        given, self.states = self.states, None
        return _Output(given)
