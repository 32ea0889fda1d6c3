"""What an inference peer computes, in a child process: completions, their proofs, the file."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import blake3
import safetensors.torch
import torch

from peers.environments import Environment, Renderer, probe_hash, task_of_step
from peers.environments import load as load_environment
from peers.policy.engine import Completions, Engine, check_engine, make_engine
from peers.policy.model import read_weights
from peers.proofs import toploc
from swarm.rollouts import seeds
from swarm.rollouts.rollouts import Rollouts
from swarm.rollouts.submission_file import Header, write


class EngineService:
    """Generates submissions with one policy at a time. Methods are called by the network process.

    `alter_weights` adds noise of that size, relative to each tensor's own, to all weights after
    loading: it makes the demo's cheater.
    """

    def __init__(
        self,
        engine: str = "native",
        alter_weights: float = 0.0,
        environment: str = "",
        environment_version: str = "",
    ) -> None:
        """Raises `UserError` for an engine or environment (unless "") that is not here: before
        anything large is fetched."""
        check_engine(engine)
        self._engine_name = engine
        self._alter_weights = alter_weights
        self._engine: Engine | None = None
        self._folder = Path()
        self._policy = -1
        self._renderer: Renderer | None = None
        self._environments: dict[tuple[str, str], Environment] = {}
        if environment:
            self._environment(environment, environment_version)
        _warm_up()

    def load(self, folder: str, policy: int) -> dict[str, Any]:
        """Make the Hugging Face folder the policy in use; raises `UserError`."""
        started = time.perf_counter()
        path = Path(folder)
        self._policy = -1  # a failure leaves nothing that could be taken for this policy
        if self._alter_weights:
            with tempfile.TemporaryDirectory() as aside:
                self._load(_altered(path, Path(aside), self._alter_weights))
        else:
            self._load(path)
        self._folder = path
        self._policy = policy
        return {"seconds": time.perf_counter() - started}

    def probe(self, environment: str, environment_version: str) -> dict[str, Any]:
        """`hash`: how this machine renders the environment's 64 probe tasks with the policy's
        tokenizer. A worker whose hash is not the manifest's would be taken for a cheat."""
        loaded = load_environment(environment, environment_version)
        return {"hash": probe_hash(loaded, Renderer(self._folder))}

    def _load(self, folder: Path) -> None:
        if self._engine is None:
            self._engine = make_engine(self._engine_name, folder)
        else:
            self._engine.load_weights(folder)

    def generate(
        self,
        run: str,
        lineage: int,
        step: int,
        policy: int,
        nonce: bytes,
        worker: str,
        number: int,
        groups: int,
        group_size: int,
        environment: str,
        environment_version: str,
        temperature: float,
        max_new_tokens: int,
        stop_ids: Sequence[int],
        path: str,
    ) -> dict[str, Any]:
        """Make submission `number` of a step and write it, durably, to `path`.

        Gives its digest and size, tokens generated, seconds spent, groups, and the share of
        completions that ended with a stop token. Raises `ValueError` when another policy is loaded
        or the model cannot hold prompt and completion, `UserError` for an unknown environment.
        """
        if self._engine is None or policy != self._policy:
            raise ValueError(f"policy {policy} is wanted, but policy {self._policy} is loaded")
        seed = seeds.submission_seed(run, nonce, worker, number)
        prompts, target_lengths = self._prompts(
            seed, step, groups, environment, environment_version
        )
        rows = range(groups * group_size)
        row_prompts = [prompts[row // group_size] for row in rows]
        started = time.perf_counter()
        made = self._engine.generate(
            row_prompts, rows, seeds.noise_key(seed), temperature, stop_ids, max_new_tokens
        )
        generated = time.perf_counter()
        proofs = _proofs(made)
        proven = time.perf_counter()
        rollouts = Rollouts.from_lists(
            group=[row // group_size for row in rows],
            sample=[row % group_size for row in rows],
            target_length=[target_lengths[row // group_size] for row in rows],
            prompts=row_prompts,
            completions=made.tokens,
            log_probabilities=[values.tolist() for values in made.log_probabilities],
            proofs=proofs,
        )
        header = Header(
            run=run,
            lineage=lineage,
            step=step,
            policy=policy,
            worker=worker,
            number=number,
            environment=environment,
            environment_version=environment_version,
            temperature=temperature,
            max_new_tokens=max_new_tokens,
            stop_ids=list(stop_ids),
            engine=self._engine_name,
        )
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        digest, size_bytes = write(Path(path), rollouts, header)
        return {
            "digest": digest,
            "size_bytes": size_bytes,
            "tokens": sum(map(len, made.tokens)),
            "groups": groups,
            "finished_share": sum(row[-1] in stop_ids for row in made.tokens) / len(made.tokens),
            "seconds_generate": generated - started,
            "seconds_proofs": proven - generated,
            "seconds_write": time.perf_counter() - proven,
        }

    def _environment(self, name: str, version: str) -> Environment:
        found = self._environments.get((name, version))
        if found is None:
            found = self._environments[name, version] = load_environment(name, version)
        return found

    def _prompts(
        self, seed: bytes, step: int, groups: int, name: str, version: str
    ) -> tuple[list[list[int]], list[int]]:
        """(token ids, target length) of each group's task."""
        environment = self._environment(name, version)
        # Every policy of a run has the same tokenizer, and a large one takes a second to read.
        raw = (self._folder / "tokenizer.json").read_bytes()
        if self._renderer is None or self._renderer.tokenizer_hash != blake3.blake3(raw).digest():
            self._renderer = Renderer(self._folder)
        tasks = [
            task_of_step(environment, seeds.task_seed(seed, group), step) for group in range(groups)
        ]
        return (
            [self._renderer.encode_prompt(task.prompt) for task in tasks],
            [task.target_length for task in tasks],
        )


def _proofs(made: Completions) -> list[bytes]:
    """Each completion's proofs, one after the other."""
    chunks = [
        toploc.chunk_rows(before, hidden)
        for before, hidden in zip(made.prompt_hidden, made.hidden, strict=True)
    ]
    proofs = iter(toploc.build([chunk for row in chunks for chunk in row]))
    return [b"".join(next(proofs) for _ in row) for row in chunks]


def _warm_up() -> None:
    """Build the tables of a first proof now, not in the first submission."""
    toploc.build([torch.randn(2, 128).bfloat16()])


def _altered(folder: Path, aside: Path, size: float) -> Path:
    """A copy of a model folder with Gaussian noise of relative `size` on every weight."""
    generator = torch.Generator().manual_seed(0)
    weights = read_weights(folder)
    for name, weight in weights.items():
        scale = size * float(weight.float().norm()) / math.sqrt(weight.numel())
        noise = torch.randn(weight.shape, generator=generator) * scale
        weights[name] = (weight.float() + noise).to(weight.dtype)
    safetensors.torch.save_file(weights, aside / "model.safetensors")
    (aside / "config.json").write_bytes((folder / "config.json").read_bytes())
    return aside
