"""What the page draws of thousands of peers that claim anything, by its own script in node."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swarm.look.dashboard.history import REFUSALS_KEPT
from tests.dashboard.harness import in_node

PEERS = 8192
"""As many as a status lists."""

SCRIPT = """
const made = {};
const element = () => ({
  style: { setProperty() {} }, children: [], dataset: {}, setAttribute() {},
  append(...all) { this.children.push(...all); }, replaceChildren(...all) { this.children = all; },
});
globalThis.document = {
  createElement: element,
  getElementById: (id) => (made[id] ??= element()),
};
const { drawBroadcast, drawRegions } = await import("./broadcast.js");
const peers = new Map();
for (let number = 0; number < PEERS; number++) {
  const source = [`p${number + 1}`, `p${(number + 1) % PEERS}`, "p0"][KIND];
  peers.set(`p${number}`, {
    roles: ["inference"], state: "live", region: `region-${number}`, policy: 5,
    speed: 1, credited: 0, sent: 1,
    arrival: { policy: 5, held: 1, source, source_share: 1, sources: 1 },
  });
}
const state = { head: { policy: 5, policy_bytes: 1 }, peers };
drawBroadcast(state);
drawRegions(state);
const told = ([id, each]) => [id, each.children.length, each.textContent];
console.log(JSON.stringify(Object.entries(made).map(told)));
"""


def draw(folder: Path, peers: int, kind: int) -> dict[str, Any]:
    """The rows and the text of each element, by its id."""
    text = SCRIPT.replace("PEERS", str(peers)).replace("KIND", str(kind))
    told = in_node(folder, text, "broadcast.js", "dom.js")
    return {name: (rows, words) for name, rows, words in told}


def test_one_peer_is_singular(tmp_path: Path) -> None:
    words = draw(tmp_path, 1, 0)["spread"][1]
    assert words.startswith("Policy 5 (1 B): 1 of 1 peer held all of it")


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["chain", "ring", "star"])
def test_claims_of_thousands_of_peers_are_drawn(kind: int, tmp_path: Path) -> None:
    drawn = draw(tmp_path, PEERS, kind)
    assert drawn["tree"][0] == 40 and drawn["regions-body"][0] == 40
    assert drawn["tree-note"][1] == "The 40 peers that are furthest behind, of 8,192."
    assert drawn["regions-note"][1] == "The 40 regions that generate most, of 8,192."


CHARTS = """
const drawn = [];
const element = () => ({
  children: [], hidden: false, innerText: "", clientWidth: 300, setAttribute() {},
  addEventListener() {}, append(...all) { this.children.push(...all); },
  replaceChildren(...all) { this.children = all; },
});
globalThis.document = { createElement: element, documentElement: null };
globalThis.getComputedStyle = () => ({ getPropertyValue: (name) => name });
globalThis.matchMedia = () => ({ addEventListener() {} });
globalThis.ResizeObserver = class { observe() {} };
globalThis.uPlot = class {
  static paths = { bars() {} };
  constructor(options, data) { this.series = options.series; drawn.push(this); }
  batch(act) { act(); } setScale() {} setData() {} destroy() {}
};
const { drawCharts } = await import("./charts.js");
const names = ["lead", "evaluation-charts", "training-charts", "cost-charts", "outer-charts"];
const places = Object.fromEntries(names.map((name) => [name, element()]));
drawCharts(places, new Map(Object.entries(STEPS)), LABELS, new Map(Object.entries(ROUNDS)));
const figures = names.flatMap((name) => places[name].children).filter((figure) => !figure.hidden);
console.log(JSON.stringify(figures.map((figure) => {
  const [name, readout] = figure.children[0].children;
  return [name.textContent, readout.children.map((part) => part.textContent)];
})));
"""


def charts(
    folder: Path, steps: dict[int, Any], labels: list[str], rounds: dict[int, Any] | None = None
) -> dict[str, list[str]]:
    """What stands above each chart, by its name."""
    text = CHARTS.replace("STEPS", json.dumps(steps)).replace("LABELS", json.dumps(labels))
    text = text.replace("ROUNDS", json.dumps(rounds or {}))
    return dict(in_node(folder, text, "charts.js"))


def test_each_environment_of_a_mixture_has_a_line(tmp_path: Path) -> None:
    steps = {
        1: {"entropy": 1.0, "kl": 0.5, "repetition": 0.25},
        2: {"entropy": 0.5, "of_each": [[1, 8, 0.75, None, 0.5, 1], [0, 4, 0.25, 0.1, 0, 0]]},
    }
    found = charts(tmp_path, steps, ["sorting", "tools"])
    assert found["entropy, nats"] == ["step 2", "all 0.5", "sorting 0.75", "tools 0.25"]
    assert found["KL, nats per token"] == ["step 2", "generation 0.5", "tools 0.1"]
    assert found["repetition"] == ["step 2", "all 0.25", "sorting 0.5", "tools 0"]
    assert found["truncated"] == ["step 2", "sorting 1", "tools 0"]
    assert found["reward"] == ["step 2", "sorting 1", "tools 0"]
    alone = charts(tmp_path, {1: steps[1]}, ["sorting"])
    assert alone["entropy, nats"] == ["step 1", "1"] and "truncated" not in alone


def test_several_trainers_have_charts_by_round(tmp_path: Path) -> None:
    moved = {"bytes_sent": 2500000, "bytes_received": 500000}
    rounds = {
        1: {"loss": 2.0, "trainers_present": 3, "trainers_merged": 0, **moved},
        2: {"loss": 1.5, "trainers_present": 4, "tokens_merged": 10**7, **moved},
    }
    found = charts(tmp_path, {}, ["sorting"], rounds)
    assert found["perplexity"] == ["round 2", "inner steps 4.48"]
    assert found["trainers"] == ["round 2", "present 4"], "how many were merged is not known"
    assert found["million tokens merged"] == ["round 2", "10"]
    assert found["MB per trainer and round"] == ["round 2", "sent 2.5", "received 0.5"]
    assert "loss, nats per token" in found and len(found) == 5


STUBS = """
const element = () => ({ addEventListener() {}, append() {} });
globalThis.document = { documentElement: null, createElement: element };
globalThis.getComputedStyle = () => ({});
globalThis.matchMedia = () => ({ addEventListener() {} });
globalThis.ResizeObserver = class { observe() {} };
"""

HELPERS = (
    STUBS
    + """
const { axis, binned, smoothed } = await import("./charts.js");
console.log(JSON.stringify(EXPRESSION));
"""
)


def helper(folder: Path, expression: str) -> Any:
    """What the charts' own functions make of something."""
    return in_node(folder, HELPERS.replace("EXPRESSION", expression), "charts.js")


def test_an_axis_does_not_make_noise_look_like_news(tmp_path: Path) -> None:
    lengths, reward, loss, falling, none, negative = helper(
        tmp_path,
        "[axis(7.0, 7.2), axis(.2, .9, { ceiling: 1 }), axis(2.99, 3.01, { zero: false }), "
        "axis(3, 9, { zero: false }), axis(null, null, { ceiling: 1 }), "
        "axis(-1, 2, { ceiling: 1 })]",
    )
    assert lengths[0] == 0 and lengths[1] > 7.2
    assert (reward, none) == ([0, 1], [0, 1])
    assert loss[1] - loss[0] > 0.6 and loss[0] < 2.99 and loss[1] > 3.01
    assert falling[0] < 3 and falling[1] > 9 and falling[1] - falling[0] < 7
    assert negative[0] < -1 and negative[1] > 2


def test_bars_of_many_steps_are_sums_of_several(tmp_path: Path) -> None:
    rows = "Array.from({ length: 250 }, (_, step) => [step, { accepted: 2, refused: step % 2 }])"
    found, few, none = helper(
        tmp_path,
        f"[binned({rows}, ['accepted', 'refused'], 40), binned([[7, {{ accepted: 1 }}]], "
        "['accepted'], 40), binned([], [], 40)]",
    )
    assert len(found) == 25 and found[1] == [
        14.5,
        {"first": 10, "last": 19, "accepted": 20, "refused": 5},
    ]
    assert few == [[7, {"first": 7, "last": 7, "accepted": 1}]] and none == []


def test_a_mean_line_keeps_gaps(tmp_path: Path) -> None:
    found = helper(tmp_path, "smoothed([1, 2, null, 3, 4, 5, 6, 7])")
    assert found == [2, 2.5, None, 3, 4, 5, 5.5, 6], "in the middle of a straight line the line"


REFUSALS = (
    STUBS
    + """
const { byCause, workerHours } = await import("./sections.js");
const refusals = ["b", "a", "b"].map((check, at) => ({ outcome: "refused", check, at }));
const causes = byCause(refusals).map(([cause, all]) => [cause, all.map(({ at }) => at)]);
const steps = new Map([
  [0, { workers: 3, seconds: 2, tokens: 600 }],
  [1, { workers: 3, tokens: 9 }],
  [2, { workers: 0, seconds: 9, tokens: 0 }],
]);
console.log(JSON.stringify([causes, workerHours(steps), workerHours(new Map())]));
"""
)


def test_refusals_by_cause_and_the_cost_of_tokens(tmp_path: Path) -> None:
    causes, hours, none = in_node(tmp_path, REFUSALS, "sections.js", "charts.js", "dom.js")
    assert f"const KEPT = {REFUSALS_KEPT};" in (tmp_path / "sections.js").read_text("utf-8")
    assert causes == [["refused: b", [0, 2]], ["refused: a", [1]]]
    assert hours == pytest.approx(6 / 3600 / 600 * 1e6) and none is None
