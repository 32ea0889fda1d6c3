"use strict";
import { Chart } from "./chart.js";

// All text from the network goes through textContent: it is never parsed as HTML.

const ROWS_SHOWN = 100;
const byId = (id) => document.getElementById(id);
const state = { head: {}, peers: new Map(), steps: new Map(), refusals: [] };
let sorted = { column: "state", down: false }, every = false;

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}
const count = (value) => value.toLocaleString("en", { maximumFractionDigits: 1 });
const known = (value) => (value < 0 ? "" : count(value));

// --- the head -------------------------------------------------------------------------------

function drawHead() {
  const { head } = state;
  byId("run").textContent = head.run;
  document.title = `${head.step ?? "–"} · ${head.run.split("/").pop()}`;
  const live = [...state.peers.values()].filter((peer) => peer.state === "live");
  const figures = {
    step: head.step === null ? "–" : `${count(head.step)} of ${count(head.steps)}`,
    state: head.state,
    policy: head.policy ?? "–",
    "live peers": count(live.length),
    "tokens/s": count(live.reduce((sum, peer) => sum + peer.speed, 0)),
  };
  if (head.held_out !== null) figures[`held-out tasks, policy ${head.held_out_policy}`] = head.held_out.toFixed(3);
  byId("figures").replaceChildren(...Object.entries(figures).map(([name, value]) => {
    const pair = element("div");
    pair.append(element("dt", name), element("dd", value));
    return pair;
  }));
  byId("trainer").textContent = head.trainer;
  byId("behind").hidden = !head.chain.length;
  byId("chain").replaceChildren(...head.chain.map((line) => element("li", line)));
  const shown = [...byId("problems").children].map((each) => each.textContent);
  if (shown.join("\n") !== head.problems.join("\n")) {
    byId("problems").replaceChildren(...head.problems.map((line) => element("li", line)));
  }
}

// --- charts ---------------------------------------------------------------------------------

const charts = {
  reward: new Chart("mean reward", "line"),
  length: new Chart("tokens per completion", "line"),
  verdicts: new Chart("verdicts", "bars"),
};
byId("charts").append(...Object.values(charts).map((chart) => chart.figure));

function drawCharts() {
  const steps = [...state.steps].sort((one, other) => one[0] - other[0]);
  for (const name of ["reward", "length"]) {
    charts[name].show(steps.filter(([, row]) => row[name] !== null).map(([step, row]) => [step, row[name]]));
  }
  charts.verdicts.show(steps.map(([step, row]) => [step, [row.accepted, row.quarantined, row.refused]]));
}

// --- peers ----------------------------------------------------------------------------------

const STATES = ["evicted", "gone", "suspected", "live"];
const COLUMNS = {
  peer: { value: (row, id) => id, text: (row, id) => (row.trusted ? "✓ " : "") + `…${id.slice(-10)}`, className: "id" },
  role: { value: (row) => row.roles.join(", ") },
  state: { value: (row) => STATES.indexOf(row.state), text: (row) => row.state },
  policy: { value: (row) => row.policy, text: (row) => known(row.policy), className: "number" },
  step: { value: (row) => row.step, text: (row) => known(row.step), className: "number" },
  "tokens/s": { value: (row) => row.speed, text: (row) => (row.speed ? count(row.speed) : ""), className: "number" },
  accepted: { value: (row) => row.accepted, className: "number" },
  refused: { value: (row) => row.refused, className: "number" },
  completions: { value: (row) => row.completions, text: (row) => count(row.completions), className: "number" },
  doing: { value: (row) => row.doing, className: "doing" },
};
const NUMBERS = new Set(["policy", "step", "tokens/s", "accepted", "refused", "completions"]);
const drawn = new Map();

for (const name of Object.keys(COLUMNS)) {
  const cell = element("th", undefined, NUMBERS.has(name) ? "number" : "");
  const button = element("button", name);
  button.type = "button";
  button.addEventListener("click", () => {
    sorted = { column: name, down: sorted.column === name ? !sorted.down : NUMBERS.has(name) };
    drawPeers();
  });
  cell.scope = "col";
  cell.append(button);
  document.querySelector("#peers thead tr").append(cell);
}

function rowOf(id, row) {
  const held = drawn.get(id);
  if (held && held.row === row) return held.shown;
  const shown = held ? held.shown : element("tr");
  shown.replaceChildren(...Object.entries(COLUMNS).map(([name, column]) => {
    const text = (column.text ?? column.value)(row, id);
    const cell = element("td", text, name === "state" ? row.state : column.className);
    if (name === "peer") cell.title = id + (row.trusted ? ", trusted by the owner" : "");
    if (name === "doing" && row.idle) cell.append(element("span", `${row.doing ? " · " : ""}${row.idle}`, "why"));
    return cell;
  }));
  drawn.set(id, { row, shown });
  return shown;
}

function drawPeers() {
  const wanted = byId("find").value.toLowerCase(), { column, down } = sorted;
  const found = [...state.peers].filter(([id, row]) => !wanted
    || [id, row.roles.join(" "), row.state, row.doing, row.idle].some((each) => each.toLowerCase().includes(wanted)));
  const value = COLUMNS[column].value, turn = down ? -1 : 1;
  found.sort(([id, row], [otherId, other]) => {
    const one = value(row, id), two = value(other, otherId);
    if (one !== two) return (one < two ? -1 : 1) * turn;
    if (row.trusted !== other.trusted) return row.trusted ? -1 : 1;
    return id < otherId ? -1 : 1;
  });
  const shown = every ? found : found.slice(0, ROWS_SHOWN);
  const rows = shown.map(([id, row]) => rowOf(id, row));
  const body = document.querySelector("#peers tbody");
  if (rows.length !== body.children.length || rows.some((row, index) => body.children[index] !== row)) {
    body.replaceChildren(...rows);
  }
  for (const id of drawn.keys()) if (!state.peers.has(id)) drawn.delete(id);
  document.querySelectorAll("#peers th").forEach((cell, index) => {
    const sort = Object.keys(COLUMNS)[index] === column ? (down ? "descending" : "ascending") : "none";
    cell.setAttribute("aria-sort", sort);
  });
  byId("count").textContent = shown.length < found.length
    ? `${count(shown.length)} of ${count(found.length)} peers shown` : `${count(found.length)} peers`;
  byId("more").hidden = shown.length === found.length;
}

byId("find").addEventListener("input", drawPeers);
byId("find").form.addEventListener("submit", (event) => event.preventDefault());
byId("more").addEventListener("click", () => { every = true; drawPeers(); });
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "INPUT") return;
  if (event.key === "/") { event.preventDefault(); byId("find").focus(); }
});

// --- refusals -------------------------------------------------------------------------------

function drawRefusals() {
  byId("refusals").replaceChildren(...state.refusals.map((each) => {
    const shown = element("article");
    const title = element("p");
    title.append(element("b", `step ${each.step}, ${each.outcome}: ${each.check}`));
    shown.append(title);
    if (each.detail) shown.append(element("p", each.detail));
    if (each.means) shown.append(element("p", `It means: ${each.means}.`), element("p", `What to do: ${each.do}.`));
    shown.append(element("p", `worker ${each.worker}`, "soft"), element("p", `submission ${each.submission}`, "soft"));
    return shown;
  }), ...(state.refusals.length ? [] : [element("p", "none so far")]));
}

// --- the stream -----------------------------------------------------------------------------

function merge(held, rows, key) {
  for (const [name, row] of Object.entries(rows)) {
    if (row === null) held.delete(key(name)); else held.set(key(name), row);
  }
}
function take(change) {
  state.head = change.head ?? state.head;
  state.refusals = change.refusals ?? state.refusals;
  if (change.peers) { merge(state.peers, change.peers, String); drawPeers(); }
  if (change.steps) { merge(state.steps, change.steps, Number); drawCharts(); }
  if (change.refusals) drawRefusals();
  if (change.head || change.peers) drawHead();
}
const link = byId("link");
const events = new EventSource("events");
events.addEventListener("snapshot", (event) => {
  state.peers.clear();
  state.steps.clear();
  take(JSON.parse(event.data));
  link.textContent = "live";
  link.className = "";
});
events.addEventListener("change", (event) => take(JSON.parse(event.data)));
events.addEventListener("error", () => {
  link.textContent = "connection lost: trying again. What is shown is out of date.";
  link.className = "lost";
});
