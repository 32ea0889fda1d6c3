"""The page's questions in node: it asks on, whatever the answer was."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

NODE = shutil.which("node")

SCRIPT = """
const asked = [], told = [], answers = [
  { ok: true, status: 200, headers: new Headers({ etag: "1" }), json: async () => ({}) },
  { ok: false, status: 304 },
  { ok: false, status: 503 },
  null,
];
let again;
globalThis.setTimeout = (call) => { again = call; };
globalThis.fetch = async (path, { headers }) => {
  asked.push(headers["if-none-match"] ?? "");
  const answer = answers[asked.length - 1];
  if (!answer) throw new TypeError("no connection");
  return answer;
};
const { follow } = await import("./stream.js");
follow({
  snapshot: () => told.push("snapshot"),
  still: () => told.push("still"),
  lost: () => told.push("lost"),
});
for (let number = 0; number < 4; number++) {
  for (let turn = 0; turn < 20; turn++) await null;
  if (number < 3) again();
}
console.log(JSON.stringify({ asked, told }));
"""


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_a_page_asks_on_whatever_the_answer_was(tmp_path: Path) -> None:
    part = files("swarm.look.dashboard").joinpath("stream.js")
    (tmp_path / "stream.js").write_bytes(part.read_bytes())
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "run.js").write_text(SCRIPT)
    done = subprocess.run(
        [NODE or "", "run.js"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "asked": ["", "1", "1", "1"],
        "told": ["snapshot", "still", "lost", "lost"],
    }
