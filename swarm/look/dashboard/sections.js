"use strict";
// Parts of the page with a few figures each: refusals, evaluation, the outer loop and what it costs.

import { written } from "./charts.js";
import { byId, bytes, count, counted, element, paragraph, short, tableRow } from "./dom.js";

// --- refusals, one card for each cause --------------------------------------------------------

const KEPT = 50; // refusals that the page is sent at most
const LISTED = 8; // submissions of one cause that are listed before the rest
const opened = new Set();

// Refusals by outcome and check, the most frequent cause first; each list has the newest first.
export function byCause(refusals) {
  const causes = new Map();
  for (const each of refusals) {
    const cause = `${each.outcome}: ${each.check}`;
    if (!causes.has(cause)) causes.set(cause, []);
    causes.get(cause).push(each);
  }
  return [...causes].sort((one, other) => other[1].length - one[1].length);
}

function causeCard([cause, found]) {
  const [newest] = found, workers = new Set(found.map(({ worker }) => worker)).size;
  const article = element("article"), title = element("p", undefined, "split");
  title.append(element("b", cause, `text-${newest.outcome}`),
    element("span", `${counted(found.length, "submissions")} of ${counted(workers, "workers")}, the newest in step ${count(newest.step)}`, "soft"));
  article.append(title);
  if (newest.means) article.append(paragraph(`It means: ${newest.means}.`), paragraph(`What to do: ${newest.do}.`));
  const details = element("details"), list = element("ul");
  details.setAttribute("aria-label", cause);
  details.open = opened.has(cause);
  details.addEventListener("toggle", () => { if (details.open) opened.add(cause); else opened.delete(cause); });
  for (const each of found.slice(0, LISTED)) {
    const line = element("li", `step ${count(each.step)}: ${each.detail || "no detail"}`);
    line.append(element("span", `worker ${each.worker}, submission ${each.submission}`, "soft id"));
    list.append(line);
  }
  if (found.length > LISTED) list.append(element("li", `and ${count(found.length - LISTED)} before`, "soft"));
  details.append(element("summary", newest.detail || "submissions"), list);
  article.append(details);
  return article;
}

export function drawRefusals(refusals, head) {
  byId("refusals-part").hidden = head.rounds > 0 && !refusals.length; // trainers of an outer loop have none
  const shown = byCause(refusals).map(causeCard);
  if (refusals.length >= KEPT) shown.push(element("p", `Of the newest ${KEPT} submissions that were not accepted.`, "note"));
  byId("refusals").replaceChildren(...(shown.length ? shown : [element("p", "None so far.", "soft")]));
}

// --- evaluation -------------------------------------------------------------------------------

export function drawEvaluation({ head }) {
  byId("evaluation").hidden = head.held_out === null;
  if (head.held_out === null) return;
  byId("evaluated").replaceChildren(`Policy ${count(head.held_out_policy)}: mean reward ${written(head.held_out)} on `
    + `${counted(head.held_out_tasks, "tasks")} never trained on, signed by `, element("span", `${short(head.evaluator)}.`, "line"));
  byId("evaluation-body").replaceChildren(...head.evaluated.map(([label, reward, low, high, tokens]) => tableRow([
    ["environment", label], ["mean reward", written(reward), "number"],
    ["95 % interval", `${written(low)}–${written(high)}`, "number"], ["tokens", written(tokens), "number"]])));
}

// --- the outer loop ---------------------------------------------------------------------------

export function drawOuter({ rounds, trainers }) {
  byId("outer").hidden = !rounds.size;
  const figure = (value) => (typeof value === "number" ? written(value) : "");
  byId("outer-body").replaceChildren(...Object.entries(trainers).map(([id, told]) => tableRow([
    ["trainer", short(id), "id"], ["round", count(told.round), "number"], ["loss", figure(told.loss), "number"],
    ["held back", figure(told.validation_loss), "number"], ["utilisation", figure(told.utilisation), "number"],
    ["sent", bytes(told.bytes_sent), "number"], ["received", bytes(told.bytes_received), "number"],
    ["rounds lost", told.rounds_lost ? count(told.rounds_lost) : "", "number"]])));
}

// --- what it costs ----------------------------------------------------------------------------

const PRICE = "swarm price of a worker-hour";

// Worker-hours per million accepted tokens, over the steps of which both are known; null: none is.
export function workerHours(steps) {
  let seconds = 0, tokens = 0;
  for (const row of steps.values()) {
    if (!row.tokens || typeof row.seconds !== "number") continue;
    seconds += row.workers * row.seconds;
    tokens += row.tokens;
  }
  return tokens ? seconds / 3600 / tokens * 1e6 : null;
}

export function drawCost({ steps, peers }) {
  const hours = workerHours(steps);
  byId("cost").hidden = hours === null;
  if (hours === null) return;
  const rows = [...steps.values()], sum = (field) => rows.reduce((total, row) => total + (row[field] ?? 0), 0);
  const price = Number(byId("price").value), words = [
    `${counted(sum("tokens"), "tokens")} were accepted in ${counted(steps.size, "steps")}`,
    `${bytes(sum("size"))} of submissions`,
    `${written(hours)} worker-hours per million accepted tokens`,
    ...(price > 0 ? [`${written(hours * price)} per million at that price`] : []),
    `${bytes([...peers.values()].reduce((total, row) => total + row.sent, 0))} sent by the peers since they started`];
  byId("cost-words").textContent = `${words.join("; ")}.`;
}

// The price stays in the browser. A page in a frame may not be allowed to keep it.
export function keepPrice(changed) {
  try { byId("price").value = localStorage.getItem(PRICE) ?? ""; } catch { /* then it is typed again */ }
  byId("price").addEventListener("input", () => {
    try { localStorage.setItem(PRICE, byId("price").value); } catch { /* as above */ }
    changed();
  });
}
