"""Proofs that a completion came from the policy it claims: TOPLOC. Imports torch.

For other rooms, by the names in docs/rooms.md: `format`, `toploc`
"""
