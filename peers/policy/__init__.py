"""Policies: loading and saving models, seeded sampling, generation engines. Imports torch."""
