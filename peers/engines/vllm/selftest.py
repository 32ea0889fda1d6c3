"""The check that ends an installation, under its interpreter, with a tiny model."""

import importlib.metadata
import sys
import tempfile
from pathlib import Path

from peers.engines import service  # noqa: F401 (can all that a child needs be imported?)
from peers.engines.vllm.check import check_engine_agrees
from peers.engines.vllm.engine import VllmEngine
from swarm.errors import UserError
from swarm.jobs import Hardware


def make_tiny(
    folder: Path, seed: int = 0, hidden: int = 128, tied: bool = True, spread: float = 0.2
) -> None:
    """Save a random Qwen2 of two layers whose heads vLLM takes on a CPU; `spread`: weights' std."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=64,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=hidden // 32,
        num_key_value_heads=1,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=spread,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2ForCausalLM(config).save_pretrained(folder, safe_serialization=True)


def main() -> None:
    """Generate with a tiny model, compare, and print the versions; a failure is one sentence."""
    with tempfile.TemporaryDirectory() as aside:
        make_tiny(Path(aside))
        try:
            engine = VllmEngine(Path(aside), 0, Hardware())
            found = check_engine_agrees(engine, Path(aside))
        except UserError as error:
            sys.exit(str(error))
    is_ = engine.capabilities
    torch_version = importlib.metadata.version("torch")
    print(
        f"{is_.name} {is_.version} on {is_.device} in {is_.dtype}, torch {torch_version}, agrees "
        f"with the native engine: {found}"
    )


if __name__ == "__main__":
    main()
