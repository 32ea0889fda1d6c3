"use strict";
import { drawBroadcast, drawRegions } from "./broadcast.js";
import { drawCharts } from "./charts.js";
import { bar, byId, count, element, paragraph } from "./dom.js";
import { drawPeers } from "./peers.js";
import "./rollouts.js";
import { follow } from "./stream.js";

const REFUSALS_SHOWN = 8;
const state = { head: {}, peers: new Map(), steps: new Map(), rounds: new Map(), refusals: [] };
let everyRefusal = false;

// --- the head -------------------------------------------------------------------------------

function drawHead() {
  const { head } = state, [owner, name] = head.run.split("/");
  byId("run").textContent = name ?? head.run;
  byId("owner").textContent = name ? `owned by ${owner}` : "";
  const outer = head.step === null && head.rounds > 0; // several trainers, and nothing else
  document.title = `${(outer ? head.round : head.step) ?? "–"} · ${name ?? head.run}`;
  const live = [...state.peers.values()].filter((peer) => peer.state === "live");
  const figures = {
    ...(head.rounds ? { round: `${count(head.round)} of ${count(head.rounds)}` } : {}),
    ...(outer ? {} : {
      step: head.step === null ? "–" : `${count(head.step)} of ${count(head.steps)}`,
      state: head.state,
      policy: head.policy === null ? "–" : count(head.policy),
    }),
    "live peers": count(live.length),
    "tokens/s": count(Math.round(live.reduce((sum, peer) => sum + peer.speed, 0))),
  };
  if (head.held_out !== null) figures[`held out, policy ${head.held_out_policy}`] = head.held_out.toFixed(3);
  byId("figures").replaceChildren(...Object.entries(figures).map(([label, value]) => {
    const pair = element("div");
    pair.append(element("dt", label), element("dd", value));
    return pair;
  }));
  const [at, last, unit] = outer ? [head.round, head.rounds, "rounds"] : [head.step ?? 0, head.steps, "steps"];
  const done = last ? Math.min(1, at / last) : 0;
  byId("progress").replaceChildren(bar(done, `${Math.round(done * 100)} % of the ${unit}`));
  byId("rollouts").hidden = !head.rollouts;
  byId("trainer").textContent = head.trainer;
  const [begun] = Object.entries(head.begun);
  byId("begun").hidden = !begun;
  if (begun) {
    byId("begun").textContent = `Lineage ${begun[0]} began with policy ${count(begun[1])}: the trainer went back to it, or took `
      + "another's place, and its log says why. Rollouts of later policies of the lineage before are stale.";
  }
  const found = head.problems.map((line) => element("li", line));
  const text = (items) => [...items].map((each) => each.textContent).join("\n");
  if (text(byId("problems").children) !== text(found)) byId("problems").replaceChildren(...found);
  byId("peers-note").hidden = !head.counted_from;
  byId("counted-from").textContent = count(head.counted_from);
}

// --- refusals -------------------------------------------------------------------------------

function drawRefusals() {
  const shown = everyRefusal ? state.refusals : state.refusals.slice(0, REFUSALS_SHOWN);
  byId("refusals").replaceChildren(...shown.map((each) => {
    const article = element("article"), title = element("p");
    title.append(element("b", `step ${each.step}, ${each.outcome}: ${each.check}`, `text-${each.outcome}`));
    article.append(title);
    if (each.detail) article.append(element("p", each.detail));
    if (each.means) article.append(paragraph(`It means: ${each.means}.`), paragraph(`What to do: ${each.do}.`));
    article.append(element("p", `worker ${each.worker}`, "soft"), element("p", `submission ${each.submission}`, "soft"));
    return article;
  }), ...(shown.length ? [] : [element("p", "none so far", "soft")]));
  byId("more-refusals").hidden = shown.length === state.refusals.length;
  byId("more-refusals").textContent = `show all ${state.refusals.length}`;
}
byId("more-refusals").addEventListener("click", () => { everyRefusal = true; drawRefusals(); });

// --- the stream -----------------------------------------------------------------------------

let charted = "", refused = "";
function take(found) {
  state.head = found.head;
  state.refusals = found.refusals;
  state.peers = new Map(Object.entries(found.peers));
  state.steps = new Map(Object.entries(found.steps).map(([step, row]) => [Number(step), row]));
  state.rounds = new Map(Object.entries(found.rounds).map(([round, row]) => [Number(round), row]));
  const steps = JSON.stringify([found.steps, found.rounds, found.head.environments]), refusals = JSON.stringify(found.refusals);
  if (steps !== charted) {
    charted = steps;
    drawCharts(byId("charts"), state.steps, state.head.environments, state.rounds);
  }
  if (refusals !== refused) { refused = refusals; drawRefusals(); }
  drawHead();
  drawBroadcast(state);
  drawRegions(state);
  drawPeers(state);
  byId("chart-note").hidden = !state.steps.size;
  byId("rounds-note").hidden = !state.rounds.size;
}
const link = byId("link");
function still() {
  link.textContent = "live";
  link.className = "on";
}
follow({
  snapshot(found) { take(found); still(); },
  still,
  lost() {
    link.textContent = "connection lost: trying again. What is shown is out of date.";
    link.className = "lost";
  },
});
