"use strict";
// The stream of events, opened again whenever it has ended.

const SILENT_MS = 45000; // a server that has nothing to tell says so every 15 s
const AGAIN_MS = 5000;

// Calls `snapshot` and `change` with what the server sends, and `lost` when it is not heard.
export function follow({ snapshot, change, lost }) {
  const events = new EventSource("events");
  let silence;
  // A browser does not notice a connection that ended while the machine slept.
  const heard = () => {
    clearTimeout(silence);
    silence = setTimeout(again, SILENT_MS);
  };
  const again = () => {
    events.close();
    lost();
    follow({ snapshot, change, lost });
  };
  events.addEventListener("snapshot", (event) => { heard(); snapshot(JSON.parse(event.data)); });
  events.addEventListener("change", (event) => { heard(); change(JSON.parse(event.data)); });
  events.addEventListener("still", heard);
  events.addEventListener("error", () => {
    lost();
    clearTimeout(silence);
    // A browser tries again by itself, but not after an answer such as 503.
    silence = setTimeout(again, events.readyState === EventSource.CLOSED ? AGAIN_MS : SILENT_MS);
  });
  heard();
}
