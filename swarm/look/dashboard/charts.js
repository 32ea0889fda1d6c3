"use strict";
// The charts of figures by step, drawn by uPlot: one cursor and one zoom for all of them.

const HEIGHT = 150, MAIN_HEIGHT = 210;
const style = getComputedStyle(document.documentElement);
const colour = (name) => style.getPropertyValue(`--${name}`).trim();
export const written = (value) => (Math.abs(value) >= 1000
  ? value.toLocaleString("en", { maximumFractionDigits: 0 })
  : Math.abs(value) > 0 && Math.abs(value) < 0.001 ? value.toExponential(1)
    : String(Number(value.toPrecision(3))));

// The figures of each environment, in the order of a row's `of_each`.
const OF_EACH = ["batch_reward", "batch_length", "entropy", "kl", "repetition", "truncated"];
const MARKS = 8; // of environments, in page.css

const all = [];
const zoomed = {}; // by unit: [first, last] step or round; without: everything

function zoom(unit, range) {
  zoomed[unit] = range;
  for (const chart of all) chart.fit();
}

class Chart {
  // series: { label, field, mark } with the name of a colour in page.css; a chart without data hides.
  // each: the figure in OF_EACH that gets a line for each environment.
  constructor(title, series, { bars = false, main = false, hint = "", each = "", unit = "step" } = {}) {
    Object.assign(this, { title, own: series, series, bars, each, unit, plot: null, rows: [], at: null });
    this.height = main ? MAIN_HEIGHT : HEIGHT;
    this.figure = document.createElement("figure");
    this.figure.tabIndex = 0;
    this.figure.title = hint;
    const caption = document.createElement("figcaption");
    const name = document.createElement("b");
    name.textContent = title;
    this.readout = document.createElement("span");
    caption.append(name, this.readout);
    this.place = document.createElement("div");
    this.figure.append(caption, this.place);
    this.figure.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => {
      if (this.plot && this.place.clientWidth) this.plot.setSize({ width: this.place.clientWidth, height: this.height });
    }).observe(this.place);
    all.push(this);
  }

  key(event) {
    const steps = this.rows.map(([step]) => step), last = steps.length - 1;
    const from = this.at ?? last;
    const to = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") { zoom(this.unit, null); return; }
    if (event.ctrlKey || event.metaKey || event.altKey || to === undefined || !this.plot || last < 0) return;
    event.preventDefault();
    this.at = Math.min(last, Math.max(0, to));
    this.plot.setCursor({ left: this.plot.valToPos(steps[this.at], "x"), top: 1 });
    this.read();
  }

  show(rows, environments) {
    if (this.each && environments.length > 1) {
      this.series = [
        ...this.own.map((line) => (line.field === this.each ? { ...line, label: line.label || "all", dashed: true } : line)),
        ...environments.map((label, index) => ({ label, field: `${this.each}/${index}`, mark: `of${index % MARKS}` })),
      ];
    }
    this.rows = rows.filter(([, row]) => this.series.some(({ field }) => typeof row[field] === "number"));
    this.figure.hidden = !this.rows.length;
    if (this.figure.hidden) return;
    if (this.at !== null && this.at >= this.rows.length) this.at = null;
    this.shown = this.series.filter(({ field }) => this.rows.some(([, row]) => typeof row[field] === "number"));
    const names = this.shown.map(({ field }) => field).join();
    if (this.plot && names !== this.names) { this.plot.destroy(); this.plot = null; }
    this.names = names;
    if (this.plot) this.plot.setData(this.data(), false);
    else this.plot = new uPlot(this.options(), this.data(), this.place);
    this.fit();
    this.read();
  }

  data() {
    const columns = this.shown.map(({ field }) => this.rows.map(([, row]) => row[field] ?? null));
    // Bars are drawn from the back to the front, each as high as those in front of it together.
    if (this.bars) for (let index = columns.length - 2; index >= 0; index--) {
      columns[index] = columns[index].map((value, at) => (value ?? 0) + (columns[index + 1][at] ?? 0));
    }
    return [this.rows.map(([step]) => step), ...columns];
  }

  fit() {
    if (!this.plot || !this.rows.length) return;
    const steps = this.plot.data[0], edge = this.bars ? .6 : 0;
    let [min, max] = zoomed[this.unit] ?? [steps[0], steps[steps.length - 1]];
    if (min === max) { min -= .5; max += .5; }
    this.plot.batch(() => this.plot.setScale("x", { min: min - edge, max: max + edge }));
  }

  options() {
    const axis = { stroke: () => colour("soft"), grid: { stroke: () => colour("line"), width: 1 },
      ticks: { show: false }, font: "11px system-ui, sans-serif", gap: 4 };
    const self = this;
    return {
      width: this.place.clientWidth || 320, height: this.height, padding: [6, 14, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: this.unit }, y: false, points: { size: 7 }, drag: { setScale: false, x: true, y: false } },
      scales: {
        x: { time: false },
        y: { range: (plot, low, high) => {
          if (low === null) return [0, 1];
          if (self.bars) return [0, (high || 1) * 1.05];
          const space = (high - low || Math.abs(high) || 1) * .08;
          return [low >= 0 && low < space * 2 ? 0 : low - space, high + space];
        } },
      },
      axes: [
        { ...axis, size: 24, space: 60, values: (plot, splits) => splits.map((value) => (Number.isInteger(value) ? value : "")) },
        { ...axis, size: 46, space: 28, values: (plot, splits) => splits.map(written) },
      ],
      series: [{}, ...this.shown.map(({ mark, sparse, dashed }) => (this.bars
        ? { stroke: () => colour(mark), fill: () => colour(mark), width: 0, points: { show: false },
          paths: uPlot.paths.bars({ size: [.8, 14] }) }
        : { stroke: () => colour(mark), width: sparse ? 1 : 1.75, dash: sparse || dashed ? [4, 4] : undefined, spanGaps: true,
          points: { show: sparse || undefined, size: 5, space: 12, fill: () => colour(mark) } }))],
      hooks: {
        setCursor: [(plot) => {
          const at = plot.cursor.idx ?? null;
          if (at !== self.at) { self.at = at; self.read(); }
        }],
        setSelect: [(plot) => {
          const { left, width } = plot.select;
          if (width < 4) return;
          const [first, last] = [left, left + width].map((x) => plot.posToVal(x, "x"));
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          zoom(self.unit, [first, last]);
        }],
        ready: [(plot) => plot.over.addEventListener("dblclick", () => zoom(self.unit, null))],
      },
    };
  }

  // Writes the figures at the cursor, or the newest ones, in the caption.
  read() {
    const last = this.rows[this.rows.length - 1], [step, row] = this.rows[this.at ?? -1] ?? last;
    const parts = this.shown.map(({ label, field, mark }) => {
      const value = row[field] ?? (this.at === null && !this.bars ? this.newest(field) : null);
      const part = document.createElement("span");
      part.className = `mark-${mark}`;
      part.textContent = `${label ? `${label} ` : ""}${typeof value === "number" ? written(value) : "–"}`;
      return part;
    });
    const where = document.createElement("span");
    where.textContent = `${this.unit} ${step}`;
    this.readout.replaceChildren(where, ...parts);
    this.figure.setAttribute("aria-label", `${this.title}: ${this.readout.innerText}`);
  }

  newest(field) {
    for (let at = this.rows.length - 1; at >= 0; at--) {
      if (typeof this.rows[at][1][field] === "number") return this.rows[at][1][field];
    }
    return null;
  }
}

const charts = [
  new Chart("reward", [
    { label: "batch", field: "batch_reward", mark: "two" },
    { label: "held out", field: "held_out", mark: "three", sparse: true },
    { label: "accepted", field: "reward", mark: "mark" },
  ], { main: true, each: "batch_reward",
    hint: "accepted: by the validators' verdicts; batch: by the trainer's word; held out: on tasks never trained on" }),
  new Chart("tokens per completion", [
    { label: "batch", field: "batch_length", mark: "two" },
    { label: "accepted", field: "length", mark: "mark" },
  ], { each: "batch_length" }),
  new Chart("verdicts", [
    { label: "refused", field: "refused", mark: "bad" },
    { label: "quarantined", field: "quarantined", mark: "warn" },
    { label: "accepted", field: "accepted", mark: "good" },
  ], { bars: true }),
  new Chart("entropy, nats", [{ label: "", field: "entropy", mark: "two" }], { each: "entropy" }),
  new Chart("KL, nats per token", [
    { label: "generation", field: "kl", mark: "two" },
    { label: "reference", field: "kl_reference", mark: "three" },
  ], { each: "kl", hint: "from the policy that generated the tokens, and from the reference policy" }),
  new Chart("repetition", [{ label: "", field: "repetition", mark: "two" }], {
    each: "repetition", hint: "share of runs of four tokens that occurred in the same completion before" }),
  new Chart("truncated", [{ label: "", field: "truncated", mark: "two" }], {
    each: "truncated", hint: "share of completions that the length limit cut off" }),
  new Chart("clipped tokens", [{ label: "share", field: "clipped", mark: "two" }]),
  new Chart("gradient norm", [{ label: "", field: "gradient_norm", mark: "two" }]),
  new Chart("loss", [{ label: "", field: "loss", mark: "two" }]),
  new Chart("learning rate", [{ label: "", field: "learning_rate", mark: "two" }]),
  new Chart("seconds per step", [{ label: "", field: "seconds", mark: "two" }]),
];

// Rounds of several trainers: medians over the trainers.
const roundCharts = [
  new Chart("perplexity", [
    { label: "inner steps", field: "perplexity", mark: "two" },
    { label: "held back", field: "validation_perplexity", mark: "three" },
  ], { main: true, unit: "round" }),
  new Chart("loss, nats per token", [
    { label: "inner steps", field: "loss", mark: "two" },
    { label: "held back", field: "validation_loss", mark: "three" },
  ], { unit: "round" }),
  new Chart("trainers", [
    { label: "present", field: "trainers_present", mark: "two" },
    { label: "merged", field: "trainers_merged", mark: "three" },
  ], { unit: "round", hint: "present as the inner steps began; merged into the state that they began from" }),
  new Chart("million tokens merged", [{ label: "", field: "tokens", mark: "two" }], { unit: "round" }),
  new Chart("MB per trainer and round", [
    { label: "sent", field: "sent", mark: "two" },
    { label: "received", field: "received", mark: "three" },
  ], { unit: "round", hint: "all that the peer sent and received since the round before" }),
  new Chart("utilisation", [{ label: "", field: "utilisation", mark: "two" }], {
    unit: "round", hint: "share of the round before that went into inner steps" }),
];

// A row with the figures of each environment as fields of their own: `entropy/0`.
function spread(row) {
  const found = { ...row };
  for (const [index, values] of (row.of_each ?? []).entries()) {
    for (const [at, name] of OF_EACH.entries()) found[`${name}/${index}`] = values[at];
  }
  return found;
}

const sorted = (rows) => [...rows].sort((one, other) => one[0] - other[0]);

export function drawCharts(place, steps, environments, rounds = new Map()) {
  if (!place.children.length) place.append(...all.map((chart) => chart.figure));
  const rows = sorted(steps).map(([step, row]) => [step, spread(row)]);
  for (const chart of charts) chart.show(rows, environments);
  const told = sorted(rounds).map(([round, row]) => [round, {
    ...row, trainers_merged: row.trainers_merged || null, tokens: row.tokens_merged / 1e6,
    sent: row.bytes_sent / 1e6, received: row.bytes_received / 1e6 }]);
  for (const chart of roundCharts) chart.show(told, []);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of all) if (chart.plot) chart.plot.redraw();
});
