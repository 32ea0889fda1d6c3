"""What all tests share: hypothesis without wall-clock limits, which a busy machine would fail."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "swarm", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("swarm")
