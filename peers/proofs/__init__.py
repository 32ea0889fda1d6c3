"""Proofs that a completion came from the policy it claims: TOPLOC. Imports torch."""
