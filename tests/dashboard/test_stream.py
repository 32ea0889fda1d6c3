"""The page's questions in node: it asks on, whatever the answer was."""

from __future__ import annotations

from pathlib import Path

from tests.dashboard.harness import in_node

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


def test_a_page_asks_on_whatever_the_answer_was(tmp_path: Path) -> None:
    assert in_node(tmp_path, SCRIPT, "stream.js") == {
        "asked": ["", "1", "1", "1"],
        "told": ["snapshot", "still", "lost", "lost"],
    }
