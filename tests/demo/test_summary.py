"""What a demo came to, from recorded events."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from peers.demo.state import SwarmState
from peers.demo.summary import draw_rewards, page, summarise
from swarm.terminal.output import write_json
from tests.demo.recorded import fresh, say, trained

PROMISED = {
    "reward_first",
    "reward_last",
    "sampled_accuracy_before",
    "sampled_accuracy_after",
    "greedy_accuracy_before",
    "greedy_accuracy_after",
    "steps",
    "seconds",
    "seconds_by_phase",
    "bytes_by_peer",
    "verdicts",
    "seed",
    "peers",
    "restarts",
    "evicted",
    "policy_folder",
}


def finished() -> SwarmState:
    state = trained(fresh(steps=20), 20)
    say(state, "trainer", "trainer.run_complete", 22.0, steps=20, folder="/somewhere")
    state.evaluated("after", {"sampled": 0.88, "greedy": 0.97, "answers": []}, 23.0)
    return state


def test_the_summary_says_everything_promised() -> None:
    state = finished()
    summary = summarise(state, 25.0, seed=7, policy_folder="demo-output/policy")
    assert summary.keys() >= PROMISED
    assert summary["reward_first"] == state.trained[0].reward
    assert summary["reward_last"] == state.trained[19].reward
    assert summary["sampled_accuracy_before"] == 0.2 and summary["greedy_accuracy_before"] == 0.5
    assert summary["sampled_accuracy_after"] == 0.88 and summary["greedy_accuracy_after"] == 0.97
    assert (summary["steps"], summary["seconds"], summary["seed"]) == (20, 25.0, 7)
    assert summary["verdicts"] == {"accepted": 40, "quarantined": 0, "proof_exponents": 1}
    assert summary["bytes_by_peer"]["inference-1"] == {"sent": 19_000, "received": 190}
    assert summary["restarts"] == {"relay-2": 1}
    assert summary["evicted"] == {"inference-3": "pooled mismatch"}


def test_a_demo_in_which_every_reward_was_0_says_so() -> None:
    state = trained(fresh(steps=20), 20)
    over = {"steps": 20, "folder": "/somewhere", "unrewarded_steps": 20, "advice": "read some"}
    say(state, "trainer", "trainer.run_complete", 23.0, **over)
    words = "the reward was 0 in each of its last 20 steps, all that this trainer saw"
    assert words in state.notes[-1].text
    summary = summarise(state, 25.0, seed=7)
    assert summary["warning"].startswith(words) and summary["warning"].endswith("; read some")
    console = Console(file=io.StringIO(), width=200)
    console.print(page(summary, {}))
    assert words in console.file.getvalue()  # type: ignore[attr-defined]
    assert summarise(finished(), 25.0, seed=7)["warning"] == ""


def test_it_is_written_as_json_and_drawn(tmp_path: Path) -> None:
    summary = summarise(finished(), 25.0, seed=0)
    write_json("--json", summary, tmp_path / "summary.json")
    assert json.loads((tmp_path / "summary.json").read_text()) == summary
    draw_rewards(summary, tmp_path / "reward.png")
    picture = (tmp_path / "reward.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000


@pytest.mark.parametrize("width", [60, 120])
def test_the_page_names_accuracies_evictions_and_files(width: int) -> None:
    summary = summarise(finished(), 25.0, seed=0)
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(page(summary, {"reward curve": Path("demo-output/reward.png")}))
    shown = console.export_text()
    assert "0.200 → 0.880" in shown and "0.500 → 0.970" in shown
    assert "inference-3: pooled mismatch" in shown
    assert "demo-output/reward.png" in shown
