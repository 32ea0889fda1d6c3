"""What the page draws of thousands of peers that claim anything, by its own script in node."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dashboard.harness import in_node

PEERS = 8192
"""As many as a status lists."""

SCRIPT = """
const made = {};
const element = () => ({
  style: { setProperty() {} }, children: [], setAttribute() {},
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
    speed: 1, credited: 0,
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
