"use strict";
// Asks for the newest snapshot again and again.

const PAUSE_MS = 2000;
const SECONDS_MAX = 30000; // a connection may have died while the machine slept

// Calls `snapshot` with what is new, `still` when nothing is, and `lost` when no answer comes.
export function follow({ snapshot, still, lost }) {
  let tag = null;
  const look = async () => {
    try {
      const headers = tag ? { "if-none-match": tag } : {};
      const answer = await fetch("snapshot.json", { headers, signal: AbortSignal.timeout(SECONDS_MAX) });
      if (answer.status === 304) still();
      else if (!answer.ok) throw new Error(answer.statusText);
      else {
        const found = await answer.json();
        tag = answer.headers.get("etag");
        snapshot(found);
      }
    } catch {
      lost();
    }
    setTimeout(look, PAUSE_MS);
  };
  look();
}
