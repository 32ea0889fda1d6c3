"""The byte format of TOPLOC proofs, and its check, which runs first and needs no torch.

`peers.proofs.toploc` explains the format.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

CHUNK_TOKENS = 32
TOP_VALUES = 128
PRIME = 65497
"""The order of the field GF(p), and the largest modulus; the 16-bit prime of the toploc package."""

PROOF_BYTES = 2 + 2 * TOP_VALUES


class ProofFormatError(ValueError):
    """Bytes that no honest builder produces: a fault that anyone can reproduce."""


def chunk_count(tokens: int) -> int:
    """Number of chunks, each with a proof, of successive tokens of one policy."""
    return -(-tokens // CHUNK_TOKENS)


def check_format(proofs: Sequence[bytes], spans: Sequence[int]) -> None:
    """Raise `ProofFormatError` unless `proofs` can belong to a completion.

    `spans`: its tokens by the policy that sampled them; no proof covers tokens of two policies. A
    span of n tokens needs ⌈n / 32⌉ proofs. Each has 258 bytes, with 128 ≤ modulus ≤ 65497 (a
    smaller modulus cannot keep 128 indices distinct) and all coefficients below 65497.
    """
    wanted = sum(chunk_count(tokens) for tokens in spans)
    if len(proofs) != wanted:
        among = f" of {len(spans)} policies" if len(spans) > 1 else ""
        raise ProofFormatError(
            f"{sum(spans)} tokens{among} need {wanted} proofs, not {len(proofs)}"
        )
    for number, proof in enumerate(proofs):
        if len(proof) != PROOF_BYTES:
            raise ProofFormatError(
                f"proof {number} has {len(proof)} bytes instead of {PROOF_BYTES}"
            )
        words = np.frombuffer(proof, dtype=">u2")
        if not TOP_VALUES <= words[0] <= PRIME:
            raise ProofFormatError(
                f"proof {number} has modulus {words[0]}, outside {TOP_VALUES} to {PRIME}"
            )
        if words[1:].max() >= PRIME:
            raise ProofFormatError(
                f"proof {number} has coefficient {words[1:].max()}, not below {PRIME}"
            )


def split(proof: bytes) -> list[bytes]:
    """Split a submission's `proof` field into its proofs, which are concatenated there.

    The last proof may be too short; `check_format` refuses it.
    """
    return [proof[start : start + PROOF_BYTES] for start in range(0, len(proof), PROOF_BYTES)]
