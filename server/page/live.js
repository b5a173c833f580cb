// The engine's state each second: counters, throughput of the last minute, and the backend of each phase.

import { showCache } from "./cache.js";
import { call, count, find, make, microseconds, rounded, several, share } from "./dom.js";

const KEPT_SECONDS = 60;
const LATELY = 10; // seconds over which steps are counted

let states = []; // of the last minute, oldest first
let prompts = null; // the look-up for a prompt as long as the newest
let cards = null;

const since = (now, before, name) => now.totals[name] - before.totals[name];

function figures(now, before) {
  const { totals } = now, seconds = now.time - before.time;
  const rate = seconds > 0 ? since(now, before, "num_output_tokens") / seconds : 0;
  const tell = {
    rate: rounded(rate),
    running: count(now.running),
    waiting: count(now.waiting),
    hits: share(totals.num_cached_tokens, totals.num_prompt_tokens),
    used: share(now.blocks.used, now.blocks.total),
    offloaded: count(now.blocks.offloaded),
  };
  for (const [id, text] of Object.entries(tell)) find(id).textContent = text;
  find("hits").title = `${count(totals.num_cached_tokens)} of ${count(totals.num_prompt_tokens)} prompt tokens since the start`;
  find("offloaded").title = `blocks in host memory; ${count(totals.offload_hits)} tokens were loaded back`;
}

function course() {
  const rates = [];
  for (let at = 1; at < states.length; at++) {
    const seconds = states[at].time - states[at - 1].time;
    rates.push(seconds > 0 ? since(states[at], states[at - 1], "num_output_tokens") / seconds : 0);
  }
  const most = Math.max(...rates, 0), end = states.at(-1).time;
  find("history").toggleAttribute("hidden", !most);
  find("most").textContent = most
    ? `output tokens/s in the last minute; peak ${rounded(most)}`
    : "No output tokens in the last minute. Send a message or call the API to fill this chart.";
  if (!most) return;
  const x = (state) => 600 - ((end - state.time) / KEPT_SECONDS) * 600;
  const points = rates.map((rate, at) => `${x(states[at + 1]).toFixed(1)},${(57 - (rate / most) * 54).toFixed(1)}`);
  find("history").querySelector("polyline").setAttribute("points", points.join(" "));
}

/** Steps of a phase by backend, between two states. */
function served(phase, now, before) {
  const was = new Map(before.steps.filter((each) => each.phase === phase).map((each) => [each.backend, each.steps]));
  return now.steps
    .filter((each) => each.phase === phase)
    .map(({ backend, steps }) => ({ backend, steps: steps - (was.get(backend) ?? 0) }))
    .filter(({ steps }) => steps > 0)
    .sort((a, b) => b.steps - a.steps);
}

/** The backend that the engine selects for a look-up: the fastest of its candidates. */
export const taken = (found) => found.ranking.find((each) => found.backends.includes(each.backend))?.backend ?? found.backends[0];

/** The text for a look-up in the measured times. found: the answer of /headway/explain. */
export function reason(found, name) {
  const { batch, kv_len: length, query_len: fresh, phase, ranking } = found;
  const sequences = several(batch, "sequence");
  const shape = phase === "extend" ? `${sequences}, ${count(fresh)} new of ${count(length)} tokens` : `${sequences} of ${count(length)} tokens`;
  if (!ranking.length) return `${shape}: not measured`;
  const [first, second] = ranking;
  const place = ranking.find((each) => each.backend === name);
  const beyond = found.covered ? "" : "; outside the measured range, so the nearest measured time is used";
  if (place && place !== first) return `${shape}: ${microseconds(place.us)} of attention in a step, ${first.backend} ${microseconds(first.us)}${beyond}`;
  const gap = second ? `, ${second.backend} takes ${(second.us / first.us).toFixed(2)}× as long` : ", the only backend measured";
  return `${shape}: ${microseconds(first.us)} of attention in a step${gap}${beyond}`;
}

function makeCards(table) {
  cards = {};
  for (const phase of ["prefill", "extend", "decode"]) {
    const parts = { name: make("p", { className: "name" }), how: make("p"), why: make("p") };
    parts.card = make("div", { className: "phase" }, make("p", { textContent: phase }), parts.name, parts.how, parts.why);
    cards[phase] = parts;
  }
  find("phases").replaceChildren(...Object.values(cards).map((parts) => parts.card));
}

function showPhase(phase, now, before, table) {
  const { card, name, how, why } = cards[phase];
  const lately = served(phase, now, before), total = lately.reduce((sum, each) => sum + each.steps, 0);
  const chosen = table.phases.find((each) => each.phase === phase).backends;
  const shown = lately[0]?.backend ?? chosen[0];
  card.classList.toggle("busy", total > 0);
  name.textContent = shown;
  const others = lately.slice(1).map((each) => `${each.backend} ${share(each.steps, total)}`);
  how.textContent = total ? `${several(total, "step")} in the last ${LATELY}\u00a0s${others.length ? `; ${others.join(", ")}` : ""}` : `no steps in the last ${LATELY}\u00a0s`;
  const found = phase === "decode" ? now.decode : prompts?.phase === phase ? prompts : null;
  why.textContent = found?.ranking.length ? reason(found, shown) : chosen.length > 1 ? `or ${chosen.slice(1).join(", ")}, depending on the step` : "";
}

/** Look up a prompt as long as the newest one that holds blocks. */
async function askForPrompts(now, table) {
  const newest = now.sequences.at(-1);
  const measured = table.phases.find((each) => each.phase === "prefill").points.length;
  if (!newest || !measured || prompts?.kv_len === newest.num_prompt_tokens) return;
  const length = newest.num_prompt_tokens;
  prompts = await (await call(`/headway/explain?phase=prefill&batch=1&query_len=${length}&kv_len=${length}`)).json();
}

/** state: the answer of /headway/state. table: the answer of /headway/table. */
export function showState(state, table) {
  if (states.length && state.time < states.at(-1).time) states = []; // another engine
  if (states.at(-1)?.time !== state.time) states.push(state);
  states = states.filter((each) => each.time >= state.time - KEPT_SECONDS);
  const lately = states.find((each) => each.time >= state.time - LATELY);
  if (!cards) makeCards(table);
  figures(state, states.at(-2) ?? state);
  course();
  for (const phase of Object.keys(cards)) showPhase(phase, state, lately, table);
  showCache(state, table);
  askForPrompts(state, table).catch(() => {}); // the next beat reports a server that is gone
}
