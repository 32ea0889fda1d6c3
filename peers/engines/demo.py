"""The demo's policy: a Qwen2 of 0.23 M parameters over 64 characters, with random weights.

Imports torch only to create the weights, so that the tokenizer alone is there at once."""

import string
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, processors

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
BOS_ID, EOS_ID, UNKNOWN_ID = 1, 2, 3
CHARACTERS = string.digits + ">" + string.ascii_lowercase + " .,:;!?+-*/=<()[]{}'\"#&%@$^_"
VOCABULARY = (PAD, BOS, EOS, UNKNOWN, *CHARACTERS[:60])
LENGTH_MAX = 64
"""Context length of the demo's model unless its recipe asks for more."""


def make_tokenizer() -> Any:
    """The character tokenizer: 64 tokens; it puts `<bos>` before every prompt."""
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({token: index for index, token in enumerate(VOCABULARY)}, UNKNOWN)
    )
    tokenizer.add_special_tokens([PAD, BOS, EOS, UNKNOWN])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)]
    )
    return tokenizer


def save_tokenizer(folder: Path) -> None:
    """Write tokenizer.json to `folder`, byte for byte the same as `make_policy` writes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(make_tokenizer().to_str(pretty=True), encoding="utf-8")


def make_policy(folder: Path, seed: int = 0, positions: int = LENGTH_MAX) -> Any:
    """Make the demo's fp32 model from `seed`, for `positions` tokens, save it, and return it."""
    import torch
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    from peers.engines.model import save

    config = Qwen2Config(
        vocab_size=len(VOCABULARY),
        hidden_size=96,
        intermediate_size=288,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=0,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    folder.mkdir(parents=True, exist_ok=True)
    PreTrainedTokenizerFast(
        tokenizer_object=make_tokenizer(),
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        model_max_length=positions,
    ).save_pretrained(folder)
    save(model, folder, tokenizer_from=folder)
    return model
