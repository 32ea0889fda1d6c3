"""What the page draws of thousands of peers that claim anything, by its own script in node."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

NODE = shutil.which("node")

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
    for name in ("broadcast.js", "dom.js"):
        part = files("swarm.look.dashboard").joinpath(name)
        (folder / name).write_bytes(part.read_bytes())
    (folder / "package.json").write_text('{"type": "module"}')
    text = SCRIPT.replace("PEERS", str(peers)).replace("KIND", str(kind))
    (folder / "draw.js").write_text(text)
    done = subprocess.run(
        [NODE or "", "draw.js"], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return {name: (rows, words) for name, rows, words in json.loads(done.stdout)}


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_one_peer_is_singular(tmp_path: Path) -> None:
    words = draw(tmp_path, 1, 0)["spread"][1]
    assert words.startswith("Policy 5 (1 B): 1 of 1 peer held all of it")


@pytest.mark.skipif(NODE is None, reason="node is not installed")
@pytest.mark.parametrize("kind", [0, 1, 2], ids=["chain", "ring", "star"])
def test_claims_of_thousands_of_peers_are_drawn(kind: int, tmp_path: Path) -> None:
    drawn = draw(tmp_path, PEERS, kind)
    assert drawn["tree"][0] == 40 and drawn["regions-body"][0] == 40
    assert drawn["tree-note"][1] == "The 40 peers that are furthest behind, of 8,192."
    assert drawn["regions-note"][1] == "The 40 regions that generate most, of 8,192."
