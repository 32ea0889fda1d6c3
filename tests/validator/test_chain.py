"""From the engine to the verdict: honest work is accepted; `tests/attacks/text` has the cheats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict
from transformers import LlamaConfig, LlamaForCausalLM

from peers.engines.native import NativeEngine
from peers.validator import prefill as prefill_module
from peers.validator.recompute import judge_sampling, sampling_figures
from swarm.ledger.evidence import WorkerEvidence
from swarm.rollouts.seeds import noise_key
from tests.engines.harness import prefill_completions
from tests.orders import ORDER
from tests.rollouts.harness import completion
from tests.validator.conftest import Stage


def test_honest_work_is_accepted_without_a_mismatch(stage: Stage) -> None:
    record = WorkerEvidence()
    for number in range(5):
        header, rollouts = stage.generate(number=number)
        assert stage.inspect(header, rollouts, number=number).failed == ""
        judged = stage.judge(number=number)
        assert judged.failed == ""
        assert judged.proofs.chunks_passed == judged.proofs.chunks == 16
        assert judged.sampling.mismatches == 0
        assert judged.evidence.tokens == judged.sampling.tokens
        assert judged.sampling.tokens == len(rollouts.log_probabilities)
        assert judged.sampling.margin_max < 1e-4
        assert all(check.passed for check in judged.checks)
        record.add("validator", judged.evidence)
    assert record.standing().p_value == 1.0


def test_a_subset_of_the_rows_is_judged_by_its_own_noise(stage: Stage) -> None:
    header, rollouts = stage.generate()
    assert stage.inspect(header, rollouts).failed == ""
    judged = stage.judge(rows=[3, 14])
    assert judged.failed == ""
    assert judged.sampling.tokens == len(completion(rollouts, 3)) + len(completion(rollouts, 14))


def test_slices_of_positions_are_judged_as_the_whole(stage: Stage) -> None:
    _, rollouts = stage.generate()
    rows = range(len(rollouts))
    completions = [completion(rollouts, row) for row in rows]
    engine = NativeEngine(stage.policy)
    prefill = prefill_completions(engine, [rollouts.prompt(row) for row in rows], completions)
    key = noise_key(stage.seed(number=7))  # another's noise
    given = (engine, prefill, completions, rows, key, 1.0)
    whole = sampling_figures(judge_sampling(*given)[0])
    assert whole.mismatches > 10
    for positions in (1, 3, 1000):
        sliced = judge_sampling(*given, entries_max=positions * engine.capabilities.vocabulary_size)
        assert asdict(sampling_figures(sliced[0])) == pytest.approx(asdict(whole), rel=1e-5)


def test_memory_is_that_of_a_slice_whatever_the_vocabulary(tmp_path: Path) -> None:
    """256 positions of 150,000 entries are 154 MB of logits; what judges a slice takes 330 MB."""
    config = LlamaConfig(
        vocab_size=150_000,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    engine = NativeEngine(tmp_path)
    prompts, completions = [[1, 2, 3]] * 8, [[4] * 32] * 8
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins anew
    before = resident_bytes("VmRSS")
    prefill = prefill_completions(engine, prompts, completions)
    margins, *_ = judge_sampling(engine, prefill, completions, range(8), (0, 0), 1.0)
    assert len(margins) == 256
    assert resident_bytes("VmHWM") - before < 420e6


def test_rows_are_prefilled_a_few_at_a_time(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.inspect(*stage.generate())
    whole = stage.judge()
    held: list[int] = []
    engine = stage.prefill._engines[ORDER.policy]
    prefill = engine.prefill

    def counted(sequences: Any, sampled: Any) -> Any:
        held.append(sum(map(len, sequences)))
        return prefill(sequences, sampled)

    monkeypatch.setattr(engine, "prefill", counted)
    monkeypatch.setattr(prefill_module, "PREFILL_TOKENS_MAX", 32)
    for rows in (None, [3, 5, 6]):
        held.clear()
        sliced = stage.judge(rows)
        assert len(held) > 1 and max(held) <= 32
        if rows is None:
            assert asdict(sliced) == asdict(whole)


def resident_bytes(figure: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(figure))


def test_other_rollouts_than_were_inspected_are_not_judged(stage: Stage) -> None:
    header, rollouts = stage.generate()
    inspected = stage.inspect(header, rollouts)
    (stage.folder / "canonical").write_bytes(b"something else")
    with pytest.raises(OSError, match="its hash differs"):
        stage.judge_canonical(inspected.canonical_digest)
