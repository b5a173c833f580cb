// The map of the cache's blocks, by request.

import { colour, count, find, make, several } from "./dom.js";

const MOST_CELLS = 480;
const MOST_ROWS = 8;

const numbers = new Map(); // request id -> the number that its colour comes from

function colourOf(id) {
  if (!numbers.has(id)) numbers.set(id, numbers.size);
  return colour(numbers.get(id));
}

/** Runs of equal blocks in the order of the map: {kind, count, request}. */
function stretches(state) {
  const { total, used, cached } = state.blocks, found = [];
  let told = 0;
  for (const each of state.sequences) {
    for (const [kind, blocks] of [["found", each.found], ["own", each.computed], ["reserved", each.reserved]]) {
      if (!blocks) continue;
      found.push({ kind, count: blocks, request: each });
      told += blocks;
    }
  }
  if (used > told) found.push({ kind: "own", count: used - told, request: null });
  found.push({ kind: "cached", count: cached, request: null }, { kind: "free", count: Math.max(total - used - cached, 0), request: null });
  return found;
}

function title({ kind, count: blocks, request }) {
  if (kind === "cached") return `${several(blocks, "cached block")}: free, but reusable for an equal prefix`;
  if (kind === "free") return `${several(blocks, "free block")}`;
  if (!request) return `${several(blocks, "block")} of other requests`;
  return `${request.request_id}: ${several(blocks, "block")} ${{ found: "prefix hit", own: "computed", reserved: "reserved" }[kind]}`;
}

function draw(state) {
  const each = Math.max(1, Math.ceil(state.blocks.total / MOST_CELLS)), map = find("map"), wanted = [];
  for (const stretch of stretches(state)) {
    const color = stretch.request ? colourOf(stretch.request.request_id) : "", text = title(stretch);
    const length = stretch.count ? Math.max(1, Math.round(stretch.count / each)) : 0; // every holder of a block has a cell
    for (let at = 0; at < length; at++) wanted.push({ kind: stretch.kind, color, text });
  }
  if (wanted.length > MOST_CELLS) wanted.length = MOST_CELLS;
  while (map.childElementCount > wanted.length) map.lastChild.remove();
  wanted.forEach(({ kind, color, text }, at) => {
    if (at === map.childElementCount) map.append(make("i"));
    const cell = Object.assign(map.children[at], { className: kind, title: text });
    cell.style.setProperty("--c", color); // "" removes it
  });
  return each;
}

function rows(state) {
  return state.sequences.slice(0, MOST_ROWS).map((each) => {
    const mark = make("i");
    mark.style.setProperty("--c", colourOf(each.request_id));
    const whole = each.completion ? `${each.request_id} #${each.completion}` : each.request_id;
    const name = make("span", { textContent: whole, title: whole });
    const figures = [each.num_tokens, each.found, each.computed, each.reserved];
    return make("tr", {}, make("td", {}, mark, name), ...figures.map((figure) => make("td", { textContent: count(figure) })));
  });
}

export function showCache(state, table) {
  const each = draw(state), { total, used, cached } = state.blocks;
  const one = each === 1 ? "A cell is one block" : `A cell is ${count(each)} blocks`;
  find("map-scale").textContent = `${one} of ${table.block_size} tokens; ${count(used)} of ${count(total)} blocks are used, ${count(cached)} cached.`;
  find("map").setAttribute("aria-label", `${count(used)} of ${count(total)} cache blocks used, ${count(cached)} cached for a prefix`);
  const shown = rows(state);
  find("requests").hidden = !shown.length;
  find("requests").tBodies[0].replaceChildren(...shown);
  const more = state.num_sequences - shown.length;
  find("more-requests").textContent = more > 0 ? `and ${count(more)} more` : "";
  const held = new Set(state.sequences.map((sequence) => sequence.request_id));
  if (numbers.size > 1000) for (const id of numbers.keys()) if (!held.has(id)) numbers.delete(id);
}
