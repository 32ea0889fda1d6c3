"""Whether a worker may round a policy's weights, by the run that it works for."""

from __future__ import annotations

from peers.engines.installed import VLLM
from swarm.errors import UserError
from swarm.wire.manifest import Thresholds


def check_quantised(engine: str, quantise: str, thresholds: Thresholds) -> None:
    """Raise `UserError` unless engine and run take the setting `inference.quantise`."""
    if quantise == "none":
        return
    if engine != VLLM:
        raise UserError(
            f"inference.quantise is {quantise!r}, but engine {engine!r} does not quantise weights; "
            f"leave it out, or use --engine {VLLM}"
        )
    if quantise not in thresholds.quantised_weights:
        raise UserError(
            f"inference.quantise is {quantise!r}, but the run's thresholds.quantised_weights does "
            "not name it, so validators would refuse the work; leave it out"
        )
