"use strict";
// The table of peers: found, sorted, and opened one by one.

import { byId, count, counted, element, known, percent, short } from "./dom.js";

const ROWS_SHOWN = 100;
const STATES = ["evicted", "gone", "suspected", "left", "finished", "live"];
const COLUMNS = {
  peer: { value: (row, id) => id, text: (row, id) => (row.trusted ? "✓ " : "") + short(id), className: "id" },
  role: { value: (row) => row.roles.join(", ") },
  state: { value: (row) => STATES.indexOf(row.state), text: (row) => row.state },
  region: { value: (row) => row.region },
  policy: { value: (row) => row.policy, text: (row) => known(row.policy), className: "number" },
  step: { value: (row) => row.step, text: (row) => known(row.step), className: "number" },
  "tokens/s": { value: (row) => row.speed, text: (row) => (row.speed ? count(row.speed) : ""), className: "number" },
  accepted: { value: (row) => row.accepted, text: (row) => (row.accepted ? count(row.accepted) : ""), className: "number" },
  refused: { value: (row) => row.refused, text: (row) => (row.refused ? count(row.refused) : ""), className: "number" },
  credits: { value: (row) => row.credited, text: (row) => (row.credited ? count(row.credited) : ""), className: "number",
    hint: "tokens of accepted and quarantined submissions in the verdicts that this page has read" },
  doing: { value: (row) => row.doing, className: "doing" },
};
const NUMBERS = new Set(["policy", "step", "tokens/s", "accepted", "refused", "credits"]);
const drawn = new Map();
let sorted = { column: "state", down: false }, every = false, opened = null, state = null;

for (const name of Object.keys(COLUMNS)) {
  const cell = element("th", undefined, NUMBERS.has(name) ? "number" : "");
  const button = element("button", name);
  button.type = "button";
  button.title = COLUMNS[name].hint ?? "";
  button.addEventListener("click", () => {
    sorted = { column: name, down: sorted.column === name ? !sorted.down : NUMBERS.has(name) };
    drawPeers(state);
  });
  cell.scope = "col";
  cell.append(button);
  document.querySelector("#peers thead tr").append(cell);
}

function rowOf(id, row) {
  const held = drawn.get(id);
  const content = JSON.stringify(row);
  if (held && held.content === content) return held.shown;
  const shown = held ? held.shown : element("tr");
  if (!held) {
    shown.tabIndex = 0;
    shown.addEventListener("click", () => open(id));
    shown.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && event.target === shown) open(id);
      if (event.key === "Escape" && opened) { open(opened); shown.focus(); }
    });
  }
  shown.replaceChildren(...Object.entries(COLUMNS).map(([name, column]) => {
    const cell = element("td", (column.text ?? column.value)(row, id), name === "state" ? row.state : column.className);
    if (name === "peer") cell.title = id + (row.trusted ? ", trusted by the owner" : "");
    if (name === "refused" && row.refused > row.accepted) cell.classList.add("refused-most");
    if (name === "doing" && row.idle) cell.append(element("span", `${row.doing ? " · " : ""}${row.idle}`, "why"));
    return cell;
  }));
  drawn.set(id, { content, shown });
  return shown;
}

// --- one peer ---------------------------------------------------------------------------------

function open(id) {
  opened = opened === id ? null : id;
  drawPeers(state);
}

// Why a worker is idle.
function whyIdle(row) {
  const { head } = state, facts = [];
  if (!row.roles.includes("inference")) return facts;
  facts.push(row.idle ? `It generates nothing: ${row.idle}.` : row.speed ? `It generates ${counted(row.speed, "tokens")}/s.` : "It reports no tokens.");
  if (row.idle && row.state === "live" && !row.idle.includes("needs policy")) facts.push(head.trainer);
  return facts;
}

function detail(id, row) {
  const shown = element("tr", undefined, "detail"), cell = element("td");
  cell.colSpan = Object.keys(COLUMNS).length;
  const facts = [];
  const { arrival } = row;
  if (arrival) {
    const from = arrival.source ? `, ${percent(arrival.source_share)} from ${arrival.source}` : "";
    facts.push(`Policy ${arrival.policy}: ${percent(arrival.held)} on its disk${from}; ${counted(arrival.sources, "sources")}.`);
  }
  if (row.reached) facts.push(`How others reach it: ${row.reached}.`);
  facts.push(...whyIdle(row));
  facts.push(`Its record over the whole run: swarm ledger --peer ${id}`);
  const list = element("ul");
  list.append(...facts.map((fact) => element("li", fact)));
  cell.append(element("p", id, "id"), list);
  shown.append(cell);
  return shown;
}

// --- all --------------------------------------------------------------------------------------

export function drawPeers(given) {
  state = given;
  const wanted = byId("find").value.toLowerCase(), { column, down } = sorted;
  const found = [...state.peers].filter(([id, row]) => !wanted
    || [id, row.roles.join(" "), row.state, row.region, row.reached, row.doing, row.idle].some((each) => each.toLowerCase().includes(wanted)));
  byId("peers").classList.toggle("no-regions", ![...state.peers.values()].some((row) => row.region));
  const value = COLUMNS[column].value, turn = down ? -1 : 1;
  found.sort(([id, row], [otherId, other]) => {
    const one = value(row, id), two = value(other, otherId);
    if (one !== two) return (one < two ? -1 : 1) * turn;
    if (row.trusted !== other.trusted) return row.trusted ? -1 : 1;
    return id < otherId ? -1 : 1;
  });
  const shown = every ? found : found.slice(0, ROWS_SHOWN);
  const rows = shown.flatMap(([id, row]) => (id === opened ? [rowOf(id, row), detail(id, row)] : [rowOf(id, row)]));
  const body = document.querySelector("#peers tbody");
  if (rows.length !== body.children.length || rows.some((row, index) => body.children[index] !== row)) {
    const focused = document.activeElement;
    body.replaceChildren(...rows);
    if (body.contains(focused)) focused.focus({ preventScroll: true });
  }
  for (const id of drawn.keys()) if (!state.peers.has(id)) drawn.delete(id);
  document.querySelectorAll("#peers th").forEach((cell, index) => {
    const sort = Object.keys(COLUMNS)[index] === column ? (down ? "descending" : "ascending") : "none";
    cell.setAttribute("aria-sort", sort);
  });
  byId("count").textContent = shown.length < found.length
    ? `${count(shown.length)} of ${counted(found.length, "peers")} shown` : counted(found.length, "peers");
  byId("more").hidden = shown.length === found.length;
}

byId("find").addEventListener("input", () => drawPeers(state));
byId("find").form.addEventListener("submit", (event) => event.preventDefault());
byId("more").addEventListener("click", () => { every = true; drawPeers(state); });
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "INPUT") return;
  if (event.key === "/") { event.preventDefault(); byId("find").focus(); }
});
