"""The page's stream in node: it is opened again however it ended."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

NODE = shutil.which("node")

SCRIPT = """
const opened = [], timers = new Map(), told = [];
let now = 0;
globalThis.setTimeout = (call, ms) => { timers.set(call, now + ms); return call; };
globalThis.clearTimeout = (call) => timers.delete(call);
const pass = (seconds) => {
  const end = now + seconds * 1000;
  for (;;) {
    const [call, at] = [...timers].sort((one, other) => one[1] - other[1])[0] ?? [];
    if (!call || at > end) break;
    timers.delete(call);
    now = at;
    call();
  }
  now = end;
};
globalThis.EventSource = class {
  static CLOSED = 2;
  constructor() { this.readyState = 1; this.calls = {}; opened.push(this); }
  addEventListener(name, call) { this.calls[name] = call; }
  close() { this.readyState = 2; }
  tell(name) { this.calls[name]({ data: "{}" }); }
};
const { follow } = await import("./stream.js");
follow({
  snapshot: () => told.push("snapshot"),
  change: () => told.push("change"),
  lost: () => told.push("lost"),
});
const newest = () => opened[opened.length - 1];
newest().tell("snapshot");
for (let number = 0; number < 100; number++) { pass(15); newest().tell("still"); }
newest().tell("change");
const quiet = opened.length;
pass(3600);  // the machine slept, or the connection died without a word
const silent = opened.length;
newest().tell("snapshot");
newest().readyState = EventSource.CLOSED;  // 503
newest().tell("error");
const before = opened.length;
pass(6);
const refused = opened.length - before;
newest().tell("snapshot");
newest().readyState = 0;  // the browser itself tries again
newest().tell("error");
const again = opened.length;
pass(6);
newest().tell("snapshot");
console.log(JSON.stringify({
  quiet, silent: silent > 1, refused, itself: opened.length - again, timers: timers.size,
  lost: told.filter((each) => each === "lost").length > 2, last: told[told.length - 1],
}));
"""


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_a_stream_that_ends_or_falls_silent_is_opened_again(tmp_path: Path) -> None:
    part = files("swarm.look.dashboard").joinpath("stream.js")
    (tmp_path / "stream.js").write_bytes(part.read_bytes())
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "run.js").write_text(SCRIPT)
    done = subprocess.run(
        [NODE or "", "run.js"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "quiet": 1,
        "silent": True,
        "refused": 1,
        "itself": 0,
        "timers": 1,
        "lost": True,
        "last": "snapshot",
    }
