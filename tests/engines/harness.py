"""Helpers for tests of engines."""

from __future__ import annotations

from collections.abc import Sequence

from peers.engines.engine import Engine, Prefill


def prefill_completions(
    engine: Engine, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]]
) -> Prefill:
    """Prefill single-turn rollouts."""
    return engine.prefill(
        [[*prompt, *completion] for prompt, completion in zip(prompts, completions, strict=True)],
        [
            range(len(prompt), len(prompt) + len(completion))
            for prompt, completion in zip(prompts, completions, strict=True)
        ],
    )
