"""The byte format of TOPLOC proofs, checked without torch: before any arithmetic, anywhere.

The format itself is explained in `peers.proofs.toploc`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

CHUNK_TOKENS = 32
TOP_VALUES = 128
PRIME = 65497
"""The field, and the largest modulus: the toploc package's choice, the 16-bit prime it ships."""

PROOF_BYTES = 2 + 2 * TOP_VALUES


class ProofFormatError(ValueError):
    """Bytes that no honest builder produces: a fault anyone can recompute."""


def check_format(proofs: Sequence[bytes], token_count: int) -> None:
    """Raise `ProofFormatError` unless these can be the proofs of a completion of `token_count`.

    There must be one per 32 tokens begun, each of 258 bytes, with 128 ≤ modulus ≤ 65497 (fewer
    residues cannot tell 128 indices apart) and all coefficients below 65497.
    """
    wanted = -(-token_count // CHUNK_TOKENS)
    if len(proofs) != wanted:
        raise ProofFormatError(f"{token_count} tokens want {wanted} proofs, not {len(proofs)}")
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
    """The proofs in a submission's `proof` field, which holds them one after the other.

    The last may be too short: `check_format` says so.
    """
    return [proof[start : start + PROOF_BYTES] for start in range(0, len(proof), PROOF_BYTES)]
