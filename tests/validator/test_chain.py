"""From the engine to the verdict: honest work is accepted, each way of cheating refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import trio
from msgspec.structs import asdict
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from peers.engines import demo
from peers.engines.native import NativeEngine
from peers.engines.sampling import gumbel_noise
from peers.inference.engine_service import EngineService
from peers.proofs import toploc
from peers.proofs.format import PRIME
from peers.validator import prefill as prefill_module
from peers.validator.evidence.worker import WorkerEvidence
from peers.validator.prefill import PrefillService
from peers.validator.recompute import judge_sampling, sampling_figures
from swarm.jobs import Load
from swarm.jobs.inference import InferenceSetup
from swarm.jobs.validation import Judge, Judged, PrefillSetup
from swarm.messages import CheckpointReference, Thresholds
from swarm.rollouts.rollouts import Rollouts
from swarm.rollouts.seeds import noise_key
from swarm.rollouts.submission_file import Header
from tests.engines.harness import prefill_completions
from tests.orders import ORDER
from tests.orders import policy as reference
from tests.rollouts.harness import completion, single_turns
from tests.validator.conftest import STOP_IDS, Stage, generate, load

Choose = Callable[[Tensor, Tensor], int]
"""(logits / T [vocabulary], noise [rows, vocabulary] of this position) → the token to take."""


def forge(stage: Stage, rollouts: Rollouts, choose: Callable[[int], Choose]) -> Rollouts:
    """Rollouts of a cheat who has the right policy and proves honestly what he generated, but
    draws row r's tokens by `choose(r)`."""
    engine, key = NativeEngine(stage.policy), noise_key(stage.seed())
    all_rows = torch.arange(len(rollouts))
    completions, proofs = [], []
    for row in range(len(rollouts)):
        prompt, tokens = rollouts.prompt(row), list[int]()
        while len(tokens) < 8 and not (tokens and tokens[-1] in STOP_IDS):
            logits = engine.logits(prefill_completions(engine, [prompt], [[*tokens, 0]]).states[0])[
                -1
            ]
            noise = gumbel_noise(key, all_rows, torch.tensor(len(tokens)), engine.vocabulary_size)
            tokens.append(choose(row)(logits, noise))
        prefill = prefill_completions(engine, [prompt], [tokens])
        chunks = toploc.chunk_rows(prefill.prompt_hidden[0], prefill.hidden[0])
        completions.append(tokens)
        proofs.append(b"".join(toploc.build(chunks)))
    return single_turns(
        group=rollouts.group.tolist(),
        sample=rollouts.sample.tolist(),
        stop_ids=STOP_IDS,
        prompts=[rollouts.prompt(row) for row in range(len(rollouts))],
        completions=completions,
        proofs=proofs,
    )


def judge(stage: Stage, header: Header, rollouts: Rollouts) -> Judged:
    inspected = stage.inspect(header, rollouts)
    assert inspected.failed == ""
    return stage.judge()


def test_honest_work_is_accepted_without_a_mismatch(stage: Stage) -> None:
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


def test_a_subset_of_the_rows_is_judged_by_its_own_noise(stage: Stage) -> None:
    header, rollouts = stage.generate()
    assert stage.inspect(header, rollouts).failed == ""
    judged = stage.judge(rows=[3, 14])
    assert judged.failed == ""
    assert judged.sampling.tokens == len(completion(rollouts, 3)) + len(completion(rollouts, 14))


def test_a_forger_who_draws_honestly_is_accepted(stage: Stage) -> None:
    """So what the next tests find is what they changed."""
    header, rollouts = stage.generate()

    def honest(row: int) -> Choose:
        return lambda logits, noise: int((logits + noise[row]).argmax())

    forged = forge(stage, rollouts, honest)
    assert [completion(forged, row) for row in range(16)] == [
        completion(rollouts, row) for row in range(16)
    ]
    assert judge(stage, header, forged).failed == ""


@pytest.mark.parametrize("size", [0.02, 0.05, 0.2])
def test_altered_weights_are_refused_at_once(stage: Stage, size: float) -> None:
    cheat = EngineService(InferenceSetup(alter_weights=size, environments=[]))
    load(cheat, stage.policy)
    path = stage.folder / "cheated"
    for number in range(3):
        generate(cheat, path, stage.order(number=number))
        inspected = stage.inspect_bytes(path.read_bytes(), number=number)
        assert inspected.failed == ""
        judged = stage.judge(number=number)
        assert judged.failed == "proofs"
        assert not judged.proven_fault
        assert "activations" in judged.detail


def test_another_policys_rollouts_are_refused(stage: Stage, tmp_path: Path) -> None:
    demo.make_policy(tmp_path, seed=2)
    other = EngineService(InferenceSetup(environments=[]))
    load(other, tmp_path)
    path = stage.folder / "other"
    generate(other, path, stage.order())
    assert stage.inspect_bytes(path.read_bytes()).failed == ""
    assert stage.judge().failed == "proofs"


def test_greedy_decoding_is_refused(stage: Stage) -> None:
    header, rollouts = stage.generate()
    forged = forge(stage, rollouts, lambda _: lambda logits, _noise: int(logits.argmax()))
    judged = judge(stage, header, forged)
    assert judged.proofs.chunks_passed == judged.proofs.chunks
    assert judged.failed == "sampling"


def test_best_of_n_by_other_noise_is_refused(stage: Stage) -> None:
    """Samples of a group exchanged: what a cheat does who sorts or selects them by reward."""
    header, rollouts = stage.generate()

    def exchanged(row: int) -> Choose:
        source = {0: 1, 1: 0}.get(row, row)
        return lambda logits, noise: int((logits + noise[source]).argmax())

    forged = forge(stage, rollouts, exchanged)
    assert completion(forged, 0) == completion(rollouts, 1)
    judged = judge(stage, header, forged)
    assert judged.proofs.chunks_passed == judged.proofs.chunks
    assert judged.failed == "sampling"


def test_suppressed_stop_tokens_are_refused(stage: Stage) -> None:
    header, rollouts = stage.generate()

    def endless(row: int) -> Choose:
        def choose(logits: Tensor, noise: Tensor) -> int:
            perturbed = logits + noise[row]
            perturbed[STOP_IDS] = -torch.inf
            return int(perturbed.argmax())

        return choose

    forged = forge(stage, rollouts, endless)
    assert len(forged.log_probabilities) == 8 * 16
    judged = judge(stage, header, forged)
    assert judged.proofs.chunks_passed == judged.proofs.chunks
    assert judged.failed == "sampling"
    stopped = sum(completion(rollouts, row)[-1] in STOP_IDS for row in range(16))
    assert (
        judged.sampling.mismatches >= stopped > 0
    )  # one or more for each ending that was suppressed


def test_one_swapped_last_token_is_refused(stage: Stage) -> None:
    """No activation depends on the last token, so only sampling can show it."""
    header, rollouts = stage.generate()
    row = int((rollouts.model_lengths() == 8).argmax())
    last = rollouts.token_offsets[row + 1] - 1
    judged = {}
    for token in range(4, 40):  # none of them stops
        tokens = rollouts.tokens.copy()
        if tokens[last] in STOP_IDS or tokens[last] == token:
            continue
        tokens[last] = token
        swapped = replace(rollouts, tokens=tokens)
        judged[token] = judge(stage, header, swapped)
        assert judged[token].proofs.chunks_passed == judged[token].proofs.chunks
        assert judged[token].sampling.mismatches == 1
    refused = [found for found in judged.values() if found.failed]
    assert len(refused) > len(judged) * 0.6  # the rest cannot be told from rounding, one by one
    assert any(found.failed == "sampling_bound" for found in refused) or all(
        found.failed == "sampling" for found in refused
    )


def test_a_swapped_token_inside_breaks_the_proof(stage: Stage) -> None:
    header, rollouts = stage.generate()
    tokens = rollouts.tokens.copy()
    row = int((rollouts.model_lengths() == 8).argmax())
    first = rollouts.token_offsets[row] + len(rollouts.prompt(row))
    tokens[first] = 30 if tokens[first] != 30 else 31
    swapped = replace(rollouts, tokens=tokens)
    assert judge(stage, header, swapped).failed == "proofs"


def test_random_proofs_are_refused(stage: Stage) -> None:
    header, rollouts = stage.generate()
    zero = PRIME.to_bytes(2, "big") + bytes(256)
    proofs = torch.frombuffer(bytearray(zero * 16), dtype=torch.uint8).numpy()
    forged = replace(rollouts, proofs=proofs)
    judged = judge(stage, header, forged)
    assert (judged.failed, judged.proofs.chunks_passed) == ("proofs", 0)


def test_a_cheats_evidence_exceeds_the_eviction_threshold(stage: Stage) -> None:
    cheat = EngineService(InferenceSetup(alter_weights=0.2, environments=[]))
    record = WorkerEvidence()
    load(cheat, stage.policy)
    path = stage.folder / "cheated"
    for number in range(3):
        generate(cheat, path, stage.order(number=number))
        stage.inspect_bytes(path.read_bytes(), number=number)
        record.add("validator", stage.judge(number=number).evidence)
    assert record.standing().p_value < Thresholds().eviction_p_value
    assert record.standing().process == "policy"


def test_honest_evidence_stays_below_every_threshold(stage: Stage) -> None:
    record = WorkerEvidence()
    for number in range(5):
        header, rollouts = stage.generate(number=number)
        stage.inspect(header, rollouts, number=number)
        record.add("validator", stage.judge(number=number).evidence)
    assert record.standing().p_value == 1.0


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
        sliced = judge_sampling(*given, entries_max=positions * engine.vocabulary_size)
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
    margins, _ = judge_sampling(engine, prefill, completions, range(8), (0, 0), 1.0)
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


def test_prefill_keeps_the_last_policies(policy: Path) -> None:
    prefill = PrefillService(PrefillSetup())
    first, second, third = (reference(step) for step in (1, 2, 3))

    def load_as(wanted: CheckpointReference) -> list[CheckpointReference]:
        return trio.run(prefill.load, Load(policy=wanted, folder=str(policy))).policies

    assert load_as(first) == [first]
    assert load_as(second) == [first, second]
    assert load_as(third) == [second, third]
    job = Judge(order=ORDER, path="", digest=bytes(32), thresholds=Thresholds(), rewards=[])
    with pytest.raises(ValueError, match="policy 1 of lineage 0 is not loaded"):
        trio.run(prefill.judge, job)


def test_other_rollouts_than_were_inspected_are_not_judged(stage: Stage) -> None:
    header, rollouts = stage.generate()
    inspected = stage.inspect(header, rollouts)
    (stage.folder / "canonical").write_bytes(b"something else")
    with pytest.raises(OSError, match="its hash differs"):
        stage.judge_canonical(inspected.canonical_digest)


def test_figures_can_travel(stage: Stage) -> None:
    header, rollouts = stage.generate()
    stage.inspect(header, rollouts)
    judged = stage.judge()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(judged), type=Judged) == judged
