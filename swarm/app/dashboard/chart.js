"use strict";
// Small charts of figures by step, in SVG. A chart is drawn anew when its data changes.

const WIDTH = 340, HEIGHT = 150, LEFT = 38, BOTTOM = 18, TOP = 8, RIGHT = 6;

function shape(name, attributes, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const written = (value) => Math.abs(value) >= 1000
  ? value.toLocaleString("en", { maximumFractionDigits: 0 }) : String(Number(value.toPrecision(3)));

export class Chart {
  // kind: "line" of values [step, value], or "bars" of [step, [accepted, quarantined, refused]].
  constructor(title, kind) {
    this.kind = kind;
    this.points = [];
    this.at = -1;
    this.figure = document.createElement("figure");
    const caption = document.createElement("figcaption");
    const name = document.createElement("b");
    name.textContent = title;
    this.readout = document.createElement("span");
    caption.append(name, this.readout);
    this.svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: "0",
      "aria-label": title });
    this.figure.append(caption, this.svg);
    this.svg.addEventListener("pointermove", (event) => {
      const box = this.svg.getBoundingClientRect();
      this.point(((event.clientX - box.left) / box.width) * WIDTH);
    });
    this.svg.addEventListener("pointerleave", () => this.choose(-1));
    this.svg.addEventListener("blur", () => this.choose(-1));
    this.svg.addEventListener("keydown", (event) => {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!by || !this.points.length) return;
      event.preventDefault();
      const from = this.at < 0 ? this.points.length - (by > 0 ? 1 : 0) : this.at;
      this.choose(Math.min(this.points.length - 1, Math.max(0, from + by)));
    });
  }

  point(x) {
    let best = -1;
    this.points.forEach(([step], index) => {
      if (best < 0 || Math.abs(this.x(step) - x) < Math.abs(this.x(this.points[best][0]) - x)) best = index;
    });
    this.choose(best);
  }

  choose(index) {
    if (index !== this.at) { this.at = index; this.draw(); }
  }

  show(points) {
    this.points = points;
    if (this.at >= points.length) this.at = -1;
    this.draw();
  }

  x(step) {
    const first = this.points[0][0], last = this.points[this.points.length - 1][0];
    const inset = this.kind === "bars" ? 6 : 0;
    return LEFT + inset + ((step - first) / Math.max(1, last - first)) * (WIDTH - LEFT - RIGHT - 2 * inset);
  }

  draw() {
    const { points, svg, kind } = this;
    svg.replaceChildren();
    if (!points.length) {
      this.readout.textContent = "no verdict yet";
      return;
    }
    const heights = points.map(([, value]) => (kind === "bars" ? value.reduce((a, b) => a + b, 0) : value));
    let low = kind === "bars" ? 0 : Math.min(...heights), high = Math.max(...heights);
    if (low === high) { high += Math.abs(high) * .1 || 1; low -= kind === "bars" ? 0 : Math.abs(low) * .1; }
    const y = (value) => HEIGHT - BOTTOM - ((value - low) / (high - low)) * (HEIGHT - BOTTOM - TOP);
    for (const value of [low, (low + high) / 2, high]) {
      svg.append(shape("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }));
      svg.append(shape("text", { x: LEFT - 4, y: y(value) + 3, "text-anchor": "end" }, written(value)));
    }
    const first = points[0], last = points[points.length - 1];
    svg.append(shape("text", { x: LEFT, y: HEIGHT - 4 }, `step ${first[0]}`));
    if (last !== first) {
      svg.append(shape("text", { x: WIDTH - RIGHT, y: HEIGHT - 4, "text-anchor": "end" }, String(last[0])));
    }
    if (kind === "bars") this.bars(y);
    else {
      const path = points.map(([step, value]) => `${this.x(step).toFixed(1)},${y(value).toFixed(1)}`);
      svg.append(shape("polyline", { class: "curve", points: path.join(" ") }));
      svg.append(shape("circle", { class: "dot", r: 2.5, cx: this.x(last[0]), cy: y(last[1]) }));
    }
    const chosen = points[this.at];
    if (chosen) {
      const x = this.x(chosen[0]);
      svg.append(shape("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }));
    }
    const [step, value] = chosen ?? last;
    this.readout.textContent = `step ${step}: ` + (kind === "bars"
      ? `${value[0]} accepted, ${value[1]} quarantined, ${value[2]} refused` : written(value));
  }

  bars(y) {
    const span = this.points[this.points.length - 1][0] - this.points[0][0] + 1;
    const width = Math.max(1, Math.min(10, ((WIDTH - LEFT - RIGHT) / span) * .8));
    for (const [step, counts] of this.points) {
      let below = 0;
      counts.forEach((count, index) => {
        if (!count) return;
        this.svg.append(shape("rect", { class: ["accepted", "quarantined", "refused"][index],
          x: this.x(step) - width / 2, width, y: y(below + count), height: y(below) - y(below + count) }));
        below += count;
      });
    }
  }
}
