"""48 layers and a vocabulary of 150,000 through the whole chain, in processes like a peer's."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.growth import DTYPES, Size, chain

MIB_MAX = 1100
"""Most memory of one part, of which some 380 MiB are torch and other libraries."""


@pytest.mark.slow
def test_honest_work_of_a_deep_model_with_a_large_vocabulary_is_accepted(tmp_path: Path) -> None:
    """Its thresholds come from other submissions of the same model."""
    size = Size(layers=48, vocabulary=150_000, groups=1, group_size=4, tokens=12)
    found = chain(tmp_path, size, submissions=3)
    for generating in DTYPES:
        assert found[f"generate {generating}"]["tokens"] > 0
        assert found[f"inspect {generating}"]["failed"] == ""
        for recomputing in DTYPES:
            judged = found[f"judge {generating} in {recomputing}"]
            assert judged["failed"] == "", judged
    most = max(
        found[part]["mib"] for part in found if part.startswith(("generate", "inspect", "judge"))
    )
    assert most < MIB_MAX
