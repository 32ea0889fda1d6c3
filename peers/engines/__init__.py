"""Engines: what generates and prefills, their models and sampling, episodes. Imports torch."""
