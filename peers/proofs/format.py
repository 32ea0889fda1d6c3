"""TOPLOC proofs as bytes (`peers.proofs.toploc`), and their first check, which needs no torch."""

import struct
from collections.abc import Sequence

CHUNK_TOKENS = 32
TOP_VALUES = 128
PRIME = 65497
"""The order of the field GF(p), and the largest modulus; the 16-bit prime of the toploc package."""

_WORDS = struct.Struct(f">{1 + TOP_VALUES}H")
PROOF_BYTES = _WORDS.size

TOKEN_BYTES = 8 + PROOF_BYTES / CHUNK_TOKENS
"""Bytes of a token in a submission's file before compression: id, log-probability, proof."""


class ProofFormatError(ValueError):
    """Bytes that no honest builder produces: a fault that anyone can reproduce."""


def chunk_count(tokens: int) -> int:
    """Number of chunks, each with a proof, of successive tokens of one policy."""
    return -(-tokens // CHUNK_TOKENS)


def check_format(proofs: Sequence[bytes], spans: Sequence[int]) -> None:
    """Raise `ProofFormatError` unless `proofs` can belong to a completion.

    `spans`: its tokens by the policy that sampled them; no proof covers tokens of two policies. A
    span of n tokens needs ⌈n / 32⌉ proofs. Each has 258 bytes, with 128 ≤ modulus ≤ 65497 (a
    smaller modulus cannot keep 128 indices distinct) and all coefficients below 65497."""
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
        modulus, *coefficients = _WORDS.unpack(proof)
        if not TOP_VALUES <= modulus <= PRIME:
            raise ProofFormatError(
                f"proof {number} has modulus {modulus}, outside {TOP_VALUES} to {PRIME}"
            )
        if max(coefficients) >= PRIME:
            raise ProofFormatError(
                f"proof {number} has coefficient {max(coefficients)}, not below {PRIME}"
            )


def split(proof: bytes) -> list[bytes]:
    """Split a `proof` field into its proofs; `check_format` refuses a last one too short."""
    return [proof[start : start + PROOF_BYTES] for start in range(0, len(proof), PROOF_BYTES)]
