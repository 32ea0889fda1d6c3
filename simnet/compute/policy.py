"""Files of a simulated policy."""

from __future__ import annotations

from blake3 import blake3

TOKENIZER = b'{"simulated": "tokenizer"}'
WEIGHTS = "model.safetensors"
TOKENIZER_HASH = blake3(TOKENIZER).digest()
