"use strict";
const form = document.querySelector("form");
const sections = [...document.querySelectorAll("section")];
const articles = [...document.querySelectorAll("article")];
const texts = new Map(sections.map((each) => [each, each.textContent.toLowerCase()]));
const bound = (name, other) => (form[name].value === "" ? other : Number(form[name].value));
function apply() {
  const environment = form.environment.value, verdict = form.verdict.value;
  const worker = form.worker.value.trim(), wanted = form.text.value.toLowerCase();
  const low = bound("low", -Infinity), high = bound("high", Infinity);
  const first = bound("first", -Infinity), last = bound("last", Infinity);
  const anyReward = low === -Infinity && high === Infinity;
  let shown = 0;
  for (const each of articles) {
    const data = each.dataset, step = Number(data.step), reward = Number(data.reward);
    each.hidden = !((!environment || data.environment === environment)
      && (!verdict || data.verdict === verdict)
      && (!worker || data.worker.includes(worker)) && step >= first && step <= last
      && (anyReward || (data.reward !== "" && reward >= low && reward <= high))
      && (!wanted || texts.get(each.parentElement).includes(wanted)));
    shown += each.hidden ? 0 : 1;
  }
  for (const each of sections) each.hidden = !each.querySelector("article:not([hidden])");
  document.getElementById("count").textContent =
    `${shown.toLocaleString("en")} of ${articles.length.toLocaleString("en")} ${articles.length === 1 ? "rollout" : "rollouts"}`;
}
function move(by) {
  const visible = articles.filter((each) => !each.hidden);
  const next = visible[Math.min(visible.length - 1,
    Math.max(0, visible.indexOf(document.activeElement) + by))];
  if (next) { next.focus({ preventScroll: true }); next.scrollIntoView({ block: "nearest" }); }
}
form.addEventListener("input", apply);
form.addEventListener("reset", () => setTimeout(apply));
form.addEventListener("submit", (event) => event.preventDefault());
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = ["INPUT", "SELECT"].includes(event.target.tagName);
  if (event.key === "Escape") { if (typing) event.target.blur(); else { form.reset(); } }
  else if (typing) return;
  else if (event.key === "j") move(1);
  else if (event.key === "k") move(-1);
  else if (event.key === "/") { event.preventDefault(); form.text.focus(); }
});
form.hidden = false;
apply();
