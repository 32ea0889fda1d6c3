"""Proofs that a completion came from the policy it claims: TOPLOC. Imports torch.

For other rooms: `format`: CHUNK_TOKENS, ProofFormatError, TOKEN_BYTES, TOP_VALUES, check_format,
chunk_count, split; `toploc`: *
"""
