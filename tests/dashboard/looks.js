"use strict";
// What a designer would find wrong with the page, as the tests in Chromium ask it.

const shown = (each) => each.checkVisibility() && !each.closest(".away, .uplot");
const named = (each) => `${each.tagName} ${each.id} ${each.className} “${each.textContent.slice(0, 40)}”`;

// What reaches beyond the window or is cut by what holds it, and figures that wrap.
function cut() {
  const found = [], page = document.documentElement, width = page.clientWidth;
  if (page.scrollWidth > width) found.push(`the page is ${page.scrollWidth} wide`);
  for (const each of [...document.querySelectorAll("body *")].filter(shown)) {
    const box = each.getBoundingClientRect(), { overflowX } = getComputedStyle(each);
    if (box.width && (box.right > width + 1 || box.left < -1)) found.push(`${named(each)} ends at ${box.right}`);
    const clips = overflowX !== "visible" && !["INPUT", "PRE"].includes(each.tagName);
    if (clips && each.scrollWidth > each.clientWidth + 1) found.push(`${named(each)} is cut`);
  }
  for (const each of document.querySelectorAll("dt, dd")) {
    const lines = each.getBoundingClientRect().height / parseFloat(getComputedStyle(each).fontSize);
    if (lines > 2) found.push(`${named(each)} wraps`);
  }
  return found.slice(0, 9);
}

// Texts whose contrast with what is behind them is below 4.5 (WCAG 2.2, 1.4.3).
function faint() {
  const read = (colour) => colour.match(/[\d.]+/g).map(Number);
  const linear = (part) => (part <= .04045 ? part / 12.92 : ((part + .055) / 1.055) ** 2.4);
  const light = (colour) => {
    const [red, green, blue] = read(colour).map((part) => linear(part / 255));
    return .2126 * red + .7152 * green + .0722 * blue;
  };
  const found = [];
  for (const each of [...document.querySelectorAll("body *")].filter(shown)) {
    if (![...each.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim())) continue;
    let behind = each;
    while (behind !== document.body && read(getComputedStyle(behind).backgroundColor)[3] === 0) behind = behind.parentElement;
    const colours = [getComputedStyle(each).color, getComputedStyle(behind).backgroundColor];
    const [low, high] = colours.map(light).sort((one, other) => one - other);
    const contrast = (high + .05) / (low + .05);
    if (contrast < 4.5) found.push(`${named(each)} has a contrast of ${contrast.toFixed(2)}`);
  }
  return found.slice(0, 9);
}

// Opens a peer and all refusals.
function open() {
  for (const each of document.querySelectorAll(".open, summary")) each.click();
}

// The bars near the ground of the chart of verdicts: their number, and the share of its width.
function bars() {
  const figure = [...document.querySelectorAll("figure")].find((each) => each.querySelector("b").textContent === "verdicts");
  const canvas = figure.querySelector("canvas"), over = figure.querySelector(".u-over"), width = over.offsetWidth;
  const top = over.offsetTop + Math.round(over.offsetHeight * .95);
  const { data } = canvas.getContext("2d").getImageData(over.offsetLeft, top, width, 1);
  const filled = [...Array(width).keys()].map((at) => {
    const [red, green, blue, alpha] = data.slice(at * 4, at * 4 + 4);
    return alpha > 128 && green > red + 40 && green > blue + 20;
  });
  return { width, share: filled.filter(Boolean).length / width, bars: filled.filter((each, at) => each && !filled[at - 1]).length };
}

// The parts of the page that are shown, from top to bottom.
const parts = () => [...document.querySelectorAll("main > section")].filter((each) => !each.hidden).map((each) => each.id);

// What stands above a chart, and where its plot is in the window.
function chart(title) {
  const figure = [...document.querySelectorAll("figure")].find((each) => each.querySelector("b").textContent === title);
  const { left, top, width, height } = figure.querySelector(".u-over").getBoundingClientRect();
  return { caption: figure.getAttribute("aria-label"), left, top, width, height };
}
