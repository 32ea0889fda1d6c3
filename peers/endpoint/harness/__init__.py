"""The environment `harness`: a program that plays an episode through OpenAI's interface.

The program runs beside the environment's code, so on the trusted side of a run. What it asks of the
model becomes prompts and observations; the model's text comes from the worker, with seeds and
proofs. Imports no torch.
"""
