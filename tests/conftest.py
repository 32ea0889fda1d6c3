"""What all tests share: hypothesis with fewer examples than its default, and without
wall-clock limits, which a busy machine would fail."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "swarm",
    max_examples=25,  # the slow fuzzing of every parser tries thousands
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("swarm")
