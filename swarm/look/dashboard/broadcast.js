"use strict";
// How the newest policy spreads: who has how much of it, and from whom; and the peers by region.

import { bar, byId, bytes, count, counted, element, percent, short, tableRow } from "./dom.js";

const ROWS_SHOWN = 40;
const CARRIERS = ["inference", "validator", "trainer", "relay", "replica", "environment"];

// [id, row, policy, share held] of every live peer that takes policies.
function carriers(state) {
  return [...state.peers].filter(([, row]) => row.state === "live" && row.roles.some((role) => CARRIERS.includes(role)))
    .map(([id, row]) => {
      const { arrival } = row;
      if (arrival && arrival.policy >= row.policy) return { id, row, policy: arrival.policy, held: arrival.held };
      return { id, row, policy: row.policy, held: row.policy < 0 ? 0 : 1 };
    });
}

// Rows in the order of a tree: each peer under the one that sent most of its newest policy.
function tree(peers) {
  const children = new Map(), known = new Set(peers.map(({ id }) => id)), roots = [];
  for (const peer of peers) {
    const source = peer.row.arrival?.source;
    if (source && known.has(source) && source !== peer.id) {
      if (!children.has(source)) children.set(source, []);
      children.get(source).push(peer);
    } else roots.push(peer);
  }
  const rows = [], seen = new Set();
  // Without recursion: peers may claim a chain as long as they are many.
  const walk = (root) => {
    const ahead = [{ ...root, depth: 0 }];
    while (ahead.length) {
      const peer = ahead.pop();
      if (seen.has(peer.id)) continue;
      seen.add(peer.id);
      rows.push(peer);
      const below = (children.get(peer.id) ?? []).map((child) => ({ ...child, depth: peer.depth + 1 }));
      ahead.push(...below.reverse());
    }
  };
  roots.sort((one, other) => other.row.roles.includes("trainer") - other.row.roles.includes("trainer")
    || (children.get(other.id)?.length ?? 0) - (children.get(one.id)?.length ?? 0));
  for (const root of roots) walk(root);
  for (const peer of peers) walk(peer); // pieces went round in a circle
  return rows;
}

function words({ row, policy, held }, newest) {
  const { arrival } = row;
  if (policy < 0) return "no policy yet";
  const behind = newest === null ? 0 : newest - policy;
  const parts = [`policy ${count(policy)}`];
  if (behind > 0) parts.push(`${count(behind)} behind`);
  if (held < 1) parts.push(percent(held));
  if (arrival?.source) parts.push(`${percent(arrival.source_share)} from ${short(arrival.source)}`);
  if (arrival && arrival.sources > 1) parts.push(counted(arrival.sources, "sources"));
  if (!arrival && row.roles.includes("trainer")) parts.push("published here");
  return parts.join(" · ");
}

function treeRow(peer, newest) {
  const shown = element("li");
  shown.style.setProperty("--depth", Math.min(peer.depth, 8));
  const name = element("span", short(peer.id), "id");
  name.title = peer.id;
  const who = [peer.row.roles.join(", "), peer.row.region].filter(Boolean).join(", ");
  const fresh = newest !== null && peer.policy >= newest;
  shown.append(name, element("span", who, "soft"), bar(peer.held, percent(peer.held), fresh ? "" : "old"),
    element("span", words(peer, newest), "soft"));
  return shown;
}

export function drawBroadcast(state) {
  const newest = state.head.policy ?? null, peers = carriers(state);
  const holders = peers.filter(({ policy, held }) => newest !== null && policy >= newest && held === 1).length;
  const reached = peers.reduce((sum, { policy, held }) => sum + (newest !== null && policy >= newest ? held : 0), 0);
  byId("broadcast").hidden = newest === null || !peers.length;
  if (byId("broadcast").hidden) return;
  const size = state.head.policy_bytes ? ` (${bytes(state.head.policy_bytes)})` : "";
  byId("spread").textContent = `Policy ${count(newest)}${size}: ${count(holders)} of ${counted(peers.length, "peers")} held `
    + `all of it at their last heartbeat.`;
  byId("reached").replaceChildren(bar(reached / peers.length, `${percent(reached / peers.length)} delivered`));
  const rows = tree(peers);
  const few = rows.length <= ROWS_SHOWN;
  const drawn = few ? rows : [...rows].sort((one, other) => one.policy - other.policy || one.held - other.held)
    .slice(0, ROWS_SHOWN).map((row) => ({ ...row, depth: 0 }));
  byId("tree").replaceChildren(...drawn.map((row) => treeRow(row, newest)));
  byId("tree-note").textContent = few
    ? "Each peer stands under the one that sent most of its newest policy."
    : `The ${ROWS_SHOWN} peers that are furthest behind, of ${count(rows.length)}.`;
}

// --- regions --------------------------------------------------------------------------------

export function drawRegions(state) {
  const regions = new Map();
  for (const [, row] of state.peers) {
    if (row.state !== "live" && row.state !== "suspected") continue;
    const name = row.region || "not named";
    const sums = regions.get(name) ?? { peers: 0, workers: 0, speed: 0, newest: 0, credited: 0, sent: 0 };
    sums.peers += 1;
    sums.workers += row.roles.includes("inference");
    sums.speed += row.speed;
    sums.newest += state.head.policy !== null && row.policy >= state.head.policy;
    sums.credited += row.credited;
    sums.sent += row.sent;
    regions.set(name, sums);
  }
  byId("regions").hidden = ![...regions.keys()].some((name) => name !== "not named");
  if (byId("regions").hidden) return;
  const most = Math.max(1, ...[...regions.values()].map(({ speed }) => speed));
  const rows = [...regions].sort((one, other) => other[1].speed - one[1].speed || other[1].peers - one[1].peers);
  byId("regions-body").replaceChildren(...rows.slice(0, ROWS_SHOWN).map(([name, sums]) => tableRow([
    ["region", name], ["peers", count(sums.peers), "number"], ["workers", count(sums.workers), "number"],
    ["tokens/s", [bar(sums.speed / most, `${count(sums.speed)} tokens/s`), element("span", count(sums.speed))], "with-bar"],
    ["hold the newest policy", count(sums.newest), "number"], ["credited tokens", count(sums.credited), "number"],
    ["sent", bytes(sums.sent), "number"]])));
  byId("regions-note").hidden = rows.length <= ROWS_SHOWN;
  byId("regions-note").textContent = `The ${ROWS_SHOWN} regions that generate most, of ${count(rows.length)}.`;
}
