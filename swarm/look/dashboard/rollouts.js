"use strict";
// Answers to read: some when the part is first looked at, others when somebody asks for them.

import { written } from "./charts.js";
import { byId, element, short } from "./dom.js";

const SPOKEN = { prompt: "prompt", model: "answer", environment: "reply of the environment" };
const figure = (name, value) => (typeof value === "number" ? [`${name} ${written(value)}`] : []);

function article(each) {
  const shown = element("article"), title = element("p", undefined, "split");
  title.append(element("b", each.reward === null ? "no reward" : `reward ${written(each.reward)}`,
    each.reward === null ? "soft" : each.reward > 0 ? "live" : "text-refused"),
  element("span", each.fate || "no verdict yet", each.verdict === "accepted" ? "soft" : `text-${each.verdict || "quarantined"}`));
  shown.append(title);
  if (each.detail) shown.append(element("p", each.detail, "soft"));
  for (const { kind, text } of each.turns) {
    const turn = element("pre", text, kind);
    turn.tabIndex = 0;
    turn.setAttribute("role", "group");
    turn.setAttribute("aria-label", SPOKEN[kind] ?? kind);
    shown.append(turn);
  }
  const figures = [`step ${each.step}`, `policy ${each.policy}`, `group ${each.group}, sample ${each.sample}`, each.environment,
    `worker ${short(each.worker)}`, ...figure("advantage", each.advantage),
    ...Object.entries(each.parts).flatMap(([name, value]) => figure(name, value))];
  shown.append(element("p", figures.filter(Boolean).join(" · "), "soft"));
  return shown;
}

async function load() {
  const step = byId("rollouts-step").value;
  byId("rollouts-state").textContent = "reading…";
  byId("rollouts-load").disabled = true;
  try {
    const answer = await fetch(`rollouts.json?step=${encodeURIComponent(step)}`);
    if (!answer.ok) throw new Error(await answer.text());
    const found = await answer.json();
    byId("rollouts-found").replaceChildren(...found.map(article));
    byId("rollouts-state").textContent = found.length ? `${found.length} of the newest` : "none";
  } catch (error) {
    byId("rollouts-state").textContent = error.message;
  }
  byId("rollouts-load").disabled = false;
}

// Reads the newest once the part is on the screen, where there are any to read.
let offered = false;
export function offerAnswers(head) {
  byId("rollouts-which").hidden = head.rollouts === "newest";
  if (!head.rollouts || offered) return;
  offered = true;
  const watcher = new IntersectionObserver((seen) => {
    if (!seen.some((each) => each.isIntersecting)) return;
    watcher.disconnect();
    load();
  });
  watcher.observe(byId("rollouts"));
}

byId("rollouts-load").form.addEventListener("submit", (event) => { event.preventDefault(); load(); });
