"use strict";
// The charts of figures by step, drawn by uPlot: one cursor and one zoom for all of them.

const HEIGHT = 150, MAIN_HEIGHT = 230;
const SMOOTH_FROM = 64; // points in view from which lines are means, and single steps are drawn faintly
const BAR_PIXELS = 7; // of one bar and the gap beside it; of more steps several share a bar
const style = getComputedStyle(document.documentElement);
const colour = (name) => style.getPropertyValue(`--${name}`).trim();
const isNumber = (value) => typeof value === "number";
export const written = (value) => (Math.abs(value) >= 1000
  ? value.toLocaleString("en", { maximumFractionDigits: 0 })
  : Math.abs(value) > 0 && Math.abs(value) < 0.001 ? value.toExponential(1)
    : String(Number(value.toPrecision(3))));

// The figures of each environment, in the order of a row's `of_each`.
const OF_EACH = ["batch_reward", "batch_length", "entropy", "kl", "repetition", "truncated"];
const MARKS = 8; // of environments, in page.css

// --- what is drawn ----------------------------------------------------------------------------

// The ends of a vertical axis. It begins at 0, or spans a fifth of its figures at least: small
// changes of a large figure look small. `ceiling` is its end while all figures are below it.
export function axis(low, high, { zero = true, ceiling = 0, least = 0 } = {}) {
  if (low === null) return [0, ceiling || least || 1];
  if (zero) {
    const top = high <= ceiling ? ceiling : Math.max(high * 1.08, least) || 1;
    return [low < 0 ? low * 1.08 : 0, top];
  }
  const span = Math.max(high - low, least, Math.max(Math.abs(low), Math.abs(high)) * .2) || 1;
  const middle = (low + high) / 2;
  return [middle - span * .55, middle + span * .55];
}

// Rows of [step, row] as sums of `fields` over several steps each, so that at most `bars` are left.
export function binned(rows, fields, bars) {
  if (!rows.length) return [];
  const steps = rows[rows.length - 1][0] - rows[0][0] + 1;
  let per = 1;
  for (let at = 0; steps / per > bars; at++) per = [1, 2, 5][at % 3] * 10 ** Math.floor(at / 3);
  const found = new Map();
  for (const [step, row] of rows) {
    const first = step - step % per;
    if (!found.has(first)) found.set(first, { first, last: first + per - 1 });
    const sums = found.get(first);
    for (const field of fields) if (isNumber(row[field])) sums[field] = (sums[field] ?? 0) + row[field];
  }
  return [...found].map(([first, sums]) => [first + (per - 1) / 2, sums]);
}

// The mean of the figures around each, of fewer at the ends.
export function smoothed(values) {
  const given = values.flatMap((value, at) => (isNumber(value) ? [at] : []));
  const side = Math.max(2, Math.round(given.length / 50)), found = values.map(() => null);
  for (const [place, at] of given.entries()) {
    const around = given.slice(Math.max(0, place - side), place + side + 1);
    found[at] = around.reduce((sum, each) => sum + values[each], 0) / around.length;
  }
  return found;
}

// --- one chart --------------------------------------------------------------------------------

const all = [];
let dragged = null; // the chart in which the mouse was pressed last
const zoomed = {}; // by unit: [first, last] step or round; without: everything

function zoom(unit, range) {
  zoomed[unit] = range;
  for (const chart of all) chart.fit();
}

class Chart {
  // series: { label, field, mark, under, sparse, low, high }, with the name of a colour in page.css.
  // `under` is a broad line beneath the others, so that a line of the same figures hides none;
  // `low` and `high` are the fields of its interval. A chart without data hides.
  // each: the figure in OF_EACH that gets a line for each environment. vertical: see `axis`.
  constructor(title, series, { bars = false, main = false, hint = "", each = "", unit = "step", vertical = {} } = {}) {
    Object.assign(this, { title, own: series, series, bars, each, unit, vertical, plot: null, rows: [], points: [], at: null });
    this.height = main ? MAIN_HEIGHT : HEIGHT;
    this.hidden = new Set();
    this.figure = document.createElement("figure");
    this.figure.tabIndex = 0;
    this.figure.hidden = true;
    const caption = document.createElement("figcaption");
    const name = document.createElement("b");
    name.textContent = title;
    name.title = hint;
    this.readout = document.createElement("span");
    caption.append(name, this.readout);
    this.place = document.createElement("div");
    this.figure.append(caption, this.place);
    this.figure.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => {
      if (!this.plot || !this.place.clientWidth) return;
      this.plot.setSize({ width: this.place.clientWidth, height: this.height });
      if (this.bars) this.fit();
    }).observe(this.place);
    all.push(this);
  }

  key(event) {
    const last = this.points.length - 1, from = this.at ?? last;
    const to = { ArrowLeft: from - 1, ArrowRight: from + 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") { zoom(this.unit, null); return; }
    if (event.ctrlKey || event.metaKey || event.altKey || to === undefined || !this.plot || last < 0) return;
    event.preventDefault();
    this.at = Math.min(last, Math.max(0, to));
    this.plot.setCursor({ left: this.plot.valToPos(this.points[this.at][0], "x"), top: 1 });
    this.read();
    const said = document.getElementById("said"); // a change of the name of what has the focus is not read out
    if (said) said.textContent = this.figure.getAttribute("aria-label");
  }

  show(rows, environments) {
    if (this.each && environments.length > 1) {
      this.series = [
        ...this.own.filter(({ field }) => !field.startsWith(`${this.each}/`)).map((line) => (line.field === this.each
          ? { ...line, label: line.label || "all", under: false, dashed: true } : line)),
        ...environments.map((label, index) => ({
          label, field: `${this.each}/${index}`, mark: `of${index % MARKS}`,
          ...(this.each === "evaluated" ? { sparse: true, low: `evaluated/${index}/low`, high: `evaluated/${index}/high` } : {}) })),
      ];
    }
    this.rows = rows.filter(([, row]) => this.series.some(({ field }) => isNumber(row[field])));
    this.figure.hidden = !this.rows.length;
    if (this.figure.hidden) return;
    this.shown = this.series.filter(({ field }) => this.rows.some(([, row]) => isNumber(row[field])));
    const names = this.shown.map(({ field }) => field).join();
    if (names !== this.names) {
      this.plot?.destroy();
      this.plot = null;
      this.parts = this.legend();
    }
    this.names = names;
    this.points = this.bars && this.plot ? this.points : this.rows;
    if (!this.plot) this.plot = new uPlot(this.options(), this.data(), this.place);
    else if (!this.bars) this.plot.setData(this.data(), false);
    this.fit();
  }

  data() {
    const columns = this.shown.map(({ field }) => this.points.map(([, row]) => row[field] ?? null));
    // Bars are drawn from the back to the front, each as high as those in front of it together.
    if (this.bars) for (let index = columns.length - 2; index >= 0; index--) {
      columns[index] = columns[index].map((value, at) => (value ?? 0) + (columns[index + 1][at] ?? 0));
    }
    return [this.points.map(([step]) => step), ...columns];
  }

  fit() {
    if (!this.plot || !this.rows.length) return;
    let [min, max] = zoomed[this.unit] ?? [this.rows[0][0], this.rows[this.rows.length - 1][0]];
    const inView = this.rows.filter(([step]) => step >= min && step <= max);
    if (this.bars) {
      const fields = this.shown.map(({ field }) => field);
      this.points = binned(inView.length ? inView : this.rows, fields, (this.place.clientWidth || 320) / BAR_PIXELS);
      this.per = this.points[0][1].last - this.points[0][1].first + 1;
      this.plot.setData(this.data(), false);
    }
    if (this.at !== null && this.at >= this.points.length) this.at = null;
    this.smooth = !this.bars && inView.length >= SMOOTH_FROM;
    for (const [index, { under, sparse }] of this.shown.entries()) {
      const line = this.plot.series[index + 1];
      if (!line || this.bars) continue;
      line.alpha = this.smooth && !sparse ? (under ? .2 : .4) : under ? .4 : 1;
      line.width = this.smooth || sparse ? 1 : under ? 6 : 1.75;
    }
    const edge = this.bars ? this.per * .6 : min === max ? .5 : 0;
    this.plot.batch(() => this.plot.setScale("x", { min: min - edge, max: max + edge }));
    this.read();
  }

  options() {
    const line = { stroke: () => colour("soft"), grid: { stroke: () => colour("line"), width: 1 },
      ticks: { show: false }, font: "11px system-ui, sans-serif", gap: 4 };
    const whole = (splits) => splits.map((value) => (Number.isInteger(value) && value >= 0 ? value : ""));
    const self = this;
    return {
      width: this.place.clientWidth || 320, height: this.height, padding: [6, 14, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: this.unit }, y: false, points: { size: 7 }, drag: { setScale: false, x: true, y: false } },
      scales: { x: { time: false }, y: { range: (plot, low, high) => axis(low, high, self.vertical) } },
      axes: [
        { ...line, size: 24, space: 60, values: (plot, splits) => whole(splits) },
        { ...line, size: 46, space: 28, values: (plot, splits) => (self.bars ? whole(splits) : splits.map(written)) },
      ],
      series: [{}, ...this.shown.map(({ field, mark, sparse, dashed }) => ({
        show: !this.hidden.has(field), stroke: () => colour(mark), ...(this.bars
          ? { fill: () => colour(mark), width: 0, points: { show: false }, paths: uPlot.paths.bars({ size: [.72, 14] }) }
          : { width: 1.75, dash: sparse || dashed ? [4, 4] : undefined, spanGaps: true,
            points: { show: () => sparse || this.points.length < 3, size: 5, space: 12, fill: () => colour(mark) } }) }))],
      hooks: {
        draw: [(plot) => { self.drawMeans(plot); self.drawIntervals(plot); }],
        setCursor: [(plot) => {
          const at = plot.cursor.idx ?? null;
          if (at !== self.at) { self.at = at; self.read(); }
        }],
        setSelect: [(plot) => {
          const { left, width } = plot.select;
          if (width < 4) return;
          // The others follow the drag and end it, too, when their scales may be the new ones already.
          if (dragged !== self) { plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false); return; }
          const [first, last] = [left, left + width].map((x) => plot.posToVal(x, "x"));
          plot.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
          zoom(self.unit, [first, last]);
        }],
        ready: [(plot) => {
          plot.over.addEventListener("mousedown", () => { dragged = self; });
          plot.over.addEventListener("dblclick", () => zoom(self.unit, null));
        }],
      },
    };
  }

  // Calls `act` with a canvas that is clipped to the plot, and the position of (step, value) on it.
  inPlot(plot, act) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.lineJoin = "round";
    act(ctx, (step, value) => [plot.valToPos(step, "x", true), plot.valToPos(value, "y", true)]);
    ctx.restore();
  }

  drawMeans(plot) {
    if (!this.smooth) return;
    this.inPlot(plot, (ctx, at) => {
      for (const [index, { field, mark, under, sparse, dashed }] of this.shown.entries()) {
        if (sparse || this.hidden.has(field)) continue;
        ctx.beginPath();
        for (const [place, value] of smoothed(plot.data[index + 1]).entries()) {
          if (value !== null) ctx.lineTo(...at(plot.data[0][place], value));
        }
        ctx.strokeStyle = colour(mark);
        ctx.globalAlpha = under ? .45 : 1;
        ctx.lineWidth = (under ? 6 : 2) * devicePixelRatio;
        ctx.setLineDash(dashed ? [4 * devicePixelRatio, 4 * devicePixelRatio] : []);
        ctx.stroke();
      }
    });
  }

  drawIntervals(plot) {
    this.inPlot(plot, (ctx, at) => {
      for (const { field, mark, low, high } of this.shown) {
        if (!low || this.hidden.has(field)) continue;
        ctx.beginPath();
        for (const [step, row] of this.points) {
          if (isNumber(row[low])) { ctx.moveTo(...at(step, row[low])); ctx.lineTo(...at(step, row[high])); }
        }
        ctx.strokeStyle = colour(mark);
        ctx.globalAlpha = .5;
        ctx.lineWidth = 2 * devicePixelRatio;
        ctx.stroke();
      }
    });
  }

  // The names of the lines above the chart; those of several are buttons that hide a line.
  legend() {
    this.where = document.createElement("span");
    const parts = this.shown.map(({ field, mark }, index) => {
      const several = this.shown.length > 1 && !this.bars, part = document.createElement(several ? "button" : "span");
      part.className = `mark-${mark}`;
      if (several) {
        part.type = "button";
        part.title = "show or hide this line";
        part.setAttribute("aria-pressed", String(!this.hidden.has(field)));
        part.addEventListener("click", () => {
          if (!this.hidden.delete(field)) this.hidden.add(field);
          part.setAttribute("aria-pressed", String(!this.hidden.has(field)));
          this.plot.setSeries(index + 1, { show: !this.hidden.has(field) });
        });
      }
      return part;
    });
    this.readout.replaceChildren(this.where, ...parts);
    return parts;
  }

  // Writes the figures at the cursor, or the newest ones, in the caption.
  read() {
    const [step, row] = this.points[this.at ?? -1] ?? this.points[this.points.length - 1];
    const at = row.first === undefined || row.first === row.last ? `${this.unit} ${row.first ?? step}`
      : `${this.unit}s ${row.first}–${row.last}`;
    this.where.textContent = at;
    const words = this.shown.map(({ label, field, low, high }, index) => {
      const value = row[field] ?? (this.at === null && !this.bars ? this.newest(field) : null);
      const interval = low && isNumber(row[low]) ? ` (${written(row[low])}–${written(row[high])})` : "";
      const text = `${label ? `${label} ` : ""}${isNumber(value) ? written(value) + interval : this.bars ? 0 : "–"}`;
      this.parts[index].textContent = text;
      return text;
    });
    this.figure.setAttribute("aria-label", `${this.title}: ${[at, ...words].join(", ")}`);
  }

  newest(field) {
    for (let at = this.rows.length - 1; at >= 0; at--) {
      if (isNumber(this.rows[at][1][field])) return this.rows[at][1][field];
    }
    return null;
  }
}

// --- the charts of the page, by their place ---------------------------------------------------

const share = { least: .1 };
const charts = {
  lead: [
    new Chart("reward", [
      { label: "batch", field: "batch_reward", mark: "two", under: true },
      { label: "held out", field: "held_out", mark: "three", sparse: true },
      { label: "accepted", field: "reward", mark: "mark" },
    ], { main: true, each: "batch_reward", vertical: { ceiling: 1 },
      hint: "accepted: by the validators' verdicts; batch: by the trainer's word; held out: on tasks never trained on" }),
    new Chart("verdicts", [
      { label: "refused", field: "refused", mark: "bad" },
      { label: "quarantined", field: "quarantined", mark: "warn" },
      { label: "accepted", field: "accepted", mark: "good" },
    ], { bars: true, main: true }),
    // Rounds of several trainers: medians over the trainers.
    new Chart("perplexity", [
      { label: "inner steps", field: "perplexity", mark: "two", under: true },
      { label: "held back", field: "validation_perplexity", mark: "three" },
    ], { main: true, unit: "round", vertical: { zero: false } }),
    new Chart("trainers", [
      { label: "present", field: "trainers_present", mark: "two", under: true },
      { label: "merged", field: "trainers_merged", mark: "three" },
    ], { main: true, unit: "round", hint: "present as the inner steps began; merged into the state that they began from" }),
  ],
  "evaluation-charts": [
    new Chart("held-out tasks", [
      { label: "", field: "evaluated/0", mark: "three", sparse: true, low: "evaluated/0/low", high: "evaluated/0/high" },
    ], { each: "evaluated", vertical: { ceiling: 1 }, hint: "mean reward, and its 95 % interval" }),
  ],
  "training-charts": [
    new Chart("tokens per completion", [
      { label: "batch", field: "batch_length", mark: "two", under: true },
      { label: "accepted", field: "length", mark: "mark" },
    ], { each: "batch_length" }),
    new Chart("entropy, nats", [{ label: "", field: "entropy", mark: "two" }], { each: "entropy", vertical: { least: .1 } }),
    new Chart("KL, nats per token", [
      { label: "generation", field: "kl", mark: "two" },
      { label: "reference", field: "kl_reference", mark: "three" },
    ], { each: "kl", vertical: { least: .01 }, hint: "from the policy that generated the tokens, and from the reference policy" }),
    new Chart("repetition", [{ label: "", field: "repetition", mark: "two" }], {
      each: "repetition", vertical: share, hint: "share of runs of four tokens that occurred in the same completion before" }),
    new Chart("truncated", [{ label: "", field: "truncated", mark: "two" }], {
      each: "truncated", vertical: share, hint: "share of completions that the length limit cut off" }),
    new Chart("clipped tokens", [{ label: "share", field: "clipped", mark: "two" }], { vertical: share }),
    new Chart("gradient norm", [{ label: "", field: "gradient_norm", mark: "two" }]),
    new Chart("loss", [{ label: "", field: "loss", mark: "two" }], { vertical: { zero: false, least: .1 } }),
    new Chart("learning rate", [{ label: "", field: "learning_rate", mark: "two" }]),
    new Chart("seconds per step", [{ label: "", field: "seconds", mark: "two" }]),
  ],
  "cost-charts": [
    new Chart("worker-seconds per 1,000 accepted tokens", [{ label: "", field: "worker_seconds", mark: "two" }], {
      hint: "workers whose submissions were judged, times the trainer's seconds of the step, by the accepted tokens" }),
    new Chart("bytes uploaded per accepted token", [{ label: "", field: "upload", mark: "mark" }], {
      hint: "sizes of the accepted submissions, by their sampled tokens" }),
  ],
  "outer-charts": [
    new Chart("loss, nats per token", [
      { label: "inner steps", field: "loss", mark: "two", under: true },
      { label: "held back", field: "validation_loss", mark: "three" },
    ], { unit: "round", vertical: { zero: false } }),
    new Chart("million tokens merged", [{ label: "", field: "tokens", mark: "two" }], { unit: "round" }),
    new Chart("MB per trainer and round", [
      { label: "sent", field: "sent", mark: "two", under: true },
      { label: "received", field: "received", mark: "three" },
    ], { unit: "round", hint: "all that the peer sent and received since the round before" }),
    new Chart("utilisation", [{ label: "", field: "utilisation", mark: "two" }], {
      unit: "round", vertical: { ceiling: 1 }, hint: "share of the round before that went into inner steps" }),
  ],
};

// A row with the figures of each environment as fields of their own, `entropy/0`, and its costs.
function spread(row, environments) {
  const found = { ...row, upload: row.tokens ? row.size / row.tokens : undefined };
  if (row.tokens && isNumber(row.seconds)) found.worker_seconds = row.workers * row.seconds / row.tokens * 1000;
  for (const [index, values] of (row.of_each ?? []).entries()) {
    for (const [at, name] of OF_EACH.entries()) found[`${name}/${index}`] = values[at];
  }
  for (const [label, reward, low, high] of row.evaluated ?? []) {
    const name = `evaluated/${Math.max(0, environments.indexOf(label))}`;
    Object.assign(found, { [name]: reward, [`${name}/low`]: low, [`${name}/high`]: high });
  }
  return found;
}

const sorted = (rows) => [...rows].sort((one, other) => one[0] - other[0]);

// Draws into `places`, elements by the names above.
export function drawCharts(places, steps, environments, rounds = new Map()) {
  for (const [name, made] of Object.entries(charts)) {
    if (places[name] && !places[name].children.length) places[name].append(...made.map((chart) => chart.figure));
  }
  const rows = sorted(steps).map(([step, row]) => [step, spread(row, environments)]);
  const told = sorted(rounds).map(([round, row]) => [round, {
    ...row, perplexity: perplexity(row.loss), validation_perplexity: perplexity(row.validation_loss),
    trainers_merged: row.trainers_merged || null, tokens: row.tokens_merged / 1e6,
    sent: row.bytes_sent / 1e6, received: row.bytes_received / 1e6 }]);
  for (const chart of all) {
    if (chart.unit === "round") chart.show(told, []);
    else chart.show(rows, environments);
  }
}

const perplexity = (loss) => (isNumber(loss) ? Math.exp(Math.min(loss, 700)) : null);

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const chart of all) if (chart.plot) chart.plot.redraw();
});
