"use strict";
// Making elements. All text from the network goes through textContent: it is never parsed as HTML.

export const byId = (id) => document.getElementById(id);

export function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// A row of a table that becomes a card on a narrow screen, with its columns' names beside the cells.
// cells: [name, text or elements, class].
export function tableRow(cells) {
  const made = element("tr");
  made.setAttribute("role", "row");
  made.append(...cells.map(([name, content, className], index) => {
    const cell = element(index ? "td" : "th", undefined, className);
    cell.setAttribute("role", index ? "cell" : "rowheader");
    cell.dataset.name = name;
    cell.append(...(Array.isArray(content) ? content : [content]));
    return cell;
  }));
  return made;
}

// A paragraph whose `words` between backticks are code.
export function paragraph(text) {
  const made = element("p");
  text.split("`").forEach((part, index) => { if (part) made.append(index % 2 ? element("code", part) : part); });
  return made;
}

export const count = (value) => value.toLocaleString("en", { maximumFractionDigits: 1 });
// `1 peer`, `1,200 peers`; the noun is given in the plural.
export const counted = (value, noun) => `${count(value)} ${value === 1 ? noun.slice(0, -1) : noun}`;
export const known = (value) => (value < 0 ? "" : count(value));
export const percent = (share) => `${Math.floor(share * 100)} %`;
export const short = (id) => `…${id.slice(-10)}`;

const UNITS = ["B", "kB", "MB", "GB", "TB"];
export function bytes(value) {
  let unit = 0;
  while (value >= 1000 && unit < UNITS.length - 1) { value /= 1000; unit += 1; }
  return `${value < 10 && unit ? value.toFixed(1) : Math.round(value)} ${UNITS[unit]}`;
}

// A bar of a share, with its words for those who do not see it.
export function bar(share, label, className) {
  const made = element("span", undefined, `bar ${className ?? ""}`);
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", label);
  const filled = element("span");
  filled.style.width = `${Math.min(100, share * 100)}%`;
  made.append(filled);
  return made;
}
