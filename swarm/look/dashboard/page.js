"use strict";
import { drawBroadcast, drawRegions } from "./broadcast.js";
import { drawCharts } from "./charts.js";
import { bar, byId, bytes, count, element } from "./dom.js";
import { drawPeers } from "./peers.js";
import { offerAnswers } from "./rollouts.js";
import { drawCost, drawEvaluation, drawOuter, drawRefusals, keepPrice } from "./sections.js";
import { follow } from "./stream.js";

const state = { head: {}, peers: new Map(), steps: new Map(), rounds: new Map(), trainers: {} };
const PLACES = Object.fromEntries(["lead", "evaluation-charts", "training-charts", "cost-charts", "outer-charts"]
  .map((name) => [name, byId(name)]));

// --- the head -------------------------------------------------------------------------------

function figures(head, outer) {
  const peers = [...state.peers.values()], live = peers.filter((peer) => peer.state === "live");
  const sum = (field) => live.reduce((total, peer) => total + peer[field], 0);
  const [, wanted] = /^wants (.+)$/.exec(head.state) ?? [];
  return {
    ...(head.rounds ? { round: `${count(head.round)} of ${count(head.rounds)}` } : {}),
    ...(outer ? {} : {
      step: head.step === null ? "–" : `${count(head.step)} of ${count(head.steps)}`,
      [wanted ? "wanted" : "state"]: wanted ?? head.state,
      policy: head.policy === null ? "–" : count(head.policy),
    }),
    "live peers": count(live.length),
    "tokens/s": count(Math.round(sum("speed"))),
    "sent by live peers": bytes(sum("sent")),
    ...(head.held_out === null ? {} : { [`held out, policy ${count(head.held_out_policy)}`]: head.held_out.toFixed(3) }),
  };
}

function drawHead() {
  const { head } = state, [owner, name] = head.run.split("/");
  byId("run").textContent = name ?? head.run;
  byId("owner").textContent = name ? `owned by ${owner}` : "";
  const outer = head.step === null && head.rounds > 0; // several trainers, and nothing else
  document.title = `${(outer ? head.round : head.step) ?? "–"} · ${name ?? head.run}`;
  byId("figures").replaceChildren(...Object.entries(figures(head, outer)).map(([label, value]) => {
    const pair = element("div");
    pair.append(element("dt", label), element("dd", value));
    return pair;
  }));
  const [at, last, unit] = outer ? [head.round, head.rounds, "rounds"] : [head.step ?? 0, head.steps, "steps"];
  const done = last ? Math.min(1, at / last) : 0;
  byId("progress").replaceChildren(bar(done, `${Math.round(done * 100)} % of the ${unit}`));
  byId("rollouts").hidden = !head.rollouts;
  if (byId("trainer").textContent !== head.trainer) byId("trainer").textContent = head.trainer; // else it is read out again
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

// Links to the parts of the page that have something to show.
function drawContents() {
  const parts = [...document.querySelectorAll("main > section[aria-labelledby]")].filter((part) => !part.hidden);
  const names = parts.map((part) => part.id).join();
  if (byId("contents").dataset.names === names) return;
  byId("contents").dataset.names = names;
  byId("contents").replaceChildren(...parts.map((part) => {
    const item = element("li"), link = element("a", part.querySelector("h2").textContent);
    link.href = `#${part.id}`;
    item.append(link);
    return item;
  }));
}

// --- the stream -----------------------------------------------------------------------------

let charted = "", refused = "";
function take(found) {
  const numbered = (rows) => new Map(Object.entries(rows).map(([number, row]) => [Number(number), row]));
  Object.assign(state, { head: found.head, trainers: found.trainers, peers: new Map(Object.entries(found.peers)),
    steps: numbered(found.steps), rounds: numbered(found.rounds) });
  drawHead();
  drawEvaluation(state);
  drawOuter(state);
  drawCost(state);
  byId("training").hidden = ![...state.steps.values()].some((row) => typeof row.seconds === "number" || "length" in row);
  byId("no-steps").hidden = state.steps.size + state.rounds.size > 0;
  byId("chart-note").hidden = !state.steps.size;
  const steps = JSON.stringify([found.steps, found.rounds, found.head.environments]), refusals = JSON.stringify(found.refusals);
  if (steps !== charted) {
    charted = steps;
    drawCharts(PLACES, state.steps, state.head.environments, state.rounds);
  }
  if (refusals !== refused) { refused = refusals; drawRefusals(found.refusals, found.head); }
  drawBroadcast(state);
  drawRegions(state);
  drawPeers(state);
  offerAnswers(state.head);
  drawContents();
}
const link = byId("link");
function still() {
  if (link.className === "on") return;
  link.textContent = "live";
  link.className = "on";
}
keepPrice(() => drawCost(state));
follow({
  snapshot(found) { take(found); still(); },
  still,
  lost() {
    if (link.className === "lost") return;
    link.textContent = "connection lost: trying again. What is shown is out of date.";
    link.className = "lost";
  },
});
