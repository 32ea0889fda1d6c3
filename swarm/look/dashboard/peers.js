"use strict";
// The table of peers: found, sorted, and opened one by one.

import { byId, bytes, count, counted, element, known, percent, short } from "./dom.js";

const ROWS_SHOWN = 100;
const STATES = ["evicted", "gone", "suspected", "left", "finished", "live"];
const COLUMNS = {
  peer: { value: (row, id) => id, className: "id" },
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
  sent: { value: (row) => row.sent, text: (row) => (row.sent ? bytes(row.sent) : ""), className: "number",
    hint: "bytes since the peer started, by its own count" },
  doing: { value: (row) => row.doing, className: "doing" },
};
const NUMBERS = new Set(["policy", "step", "tokens/s", "accepted", "refused", "credits", "sent"]);
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
  cell.setAttribute("role", "columnheader");
  cell.append(button);
  document.querySelector("#peers thead tr").append(cell);
}

function rowOf(id, row) {
  const held = drawn.get(id);
  const content = JSON.stringify(row);
  if (held && held.content === content) return held.shown;
  const shown = held ? held.shown : element("tr");
  // The button stays the same element, so that it keeps the focus.
  const button = held ? held.button : element("button", undefined, "open");
  if (!held) {
    shown.setAttribute("role", "row");
    button.type = "button";
    button.title = id;
    shown.addEventListener("click", () => open(id));
    shown.addEventListener("keydown", (event) => { if (event.key === "Escape" && opened === id) open(id); });
  }
  button.textContent = (row.trusted ? "✓ " : "") + short(id);
  button.setAttribute("aria-label", `${short(id)}, ${row.roles.join(", ")}${row.trusted ? ", trusted by the owner" : ""}`);
  const focused = document.activeElement === button;
  shown.replaceChildren(...Object.entries(COLUMNS).map(([name, column]) => {
    const cell = element("td", undefined, name === "state" ? row.state : column.className);
    cell.setAttribute("role", "cell");
    cell.dataset.name = name;
    if (name === "peer") cell.append(button);
    else if (name === "doing" || name === "role") cell.append(element("span", column.value(row), "brief"));
    else cell.textContent = (column.text ?? column.value)(row, id);
    if (name === "refused" && row.refused > row.accepted) cell.classList.add("refused-most");
    if (name === "doing" && row.idle) cell.firstChild.append(element("span", `${row.doing ? " · " : ""}${row.idle}`, "why"));
    return cell;
  }));
  if (focused) button.focus({ preventScroll: true });
  drawn.set(id, { content, shown, button });
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
  shown.setAttribute("role", "row");
  cell.setAttribute("role", "cell");
  cell.colSpan = Object.keys(COLUMNS).length;
  const facts = [];
  const { arrival } = row;
  if (arrival) {
    const from = arrival.source ? `, ${percent(arrival.source_share)} from ${arrival.source}` : "";
    facts.push(`Policy ${arrival.policy}: ${percent(arrival.held)} on its disk${from}; ${counted(arrival.sources, "sources")}.`);
  }
  if (row.doing) facts.push(`What it says it does: ${row.doing}.`);
  if (row.reached) facts.push(`How others reach it: ${row.reached}.`);
  if (row.sent || row.received) facts.push(`Since it started it has sent ${bytes(row.sent)} and received ${bytes(row.received)}, by its own count.`);
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
  for (const [id, { button }] of drawn) {
    if (!state.peers.has(id)) drawn.delete(id);
    else button.setAttribute("aria-expanded", String(id === opened));
  }
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
