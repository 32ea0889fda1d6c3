"""Files of a simulated policy."""

from __future__ import annotations

from blake3 import blake3

from swarm.rollouts.seeds import digest

TOKENIZER = b'{"simulated": "tokenizer"}'
WEIGHTS = "model.safetensors"
TOKENIZER_HASH = blake3(TOKENIZER).digest()

PROBE_HASH = digest("simnet/1/probe")
"""The probe hash of every honest simulated machine."""
