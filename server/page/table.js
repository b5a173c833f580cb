// The crossover table: the fastest backend at each measured point, and the times for any step.

import { call, colour, count, find, make, microseconds, rounded, several } from "./dom.js";
import { reason, taken } from "./live.js";

let table = null;
let backends = [];
let asked = 0; // look-ups so far: only the last one's answer is shown, even if an earlier one arrives later

const colourOf = (name) => colour(backends.indexOf(name));
const ranked = (point) => Object.entries(point.us).filter(([, us]) => us !== null).sort((a, b) => a[1] - b[1]);
const phaseOf = (name) => table.phases.find((each) => each.phase === name);

/** The length of a point in words: "64 tokens", or "4 of 64" where 60 of them are cached. */
function lengthOf(phase, point) {
  return phase === "prefill" || point.query_len === 1 ? several(point.kv_len, "token") : `${count(point.query_len)} of ${count(point.kv_len)}`;
}

/** A cell of the heat map: the fastest backend and its lead over the next one. */
function cell(phase, point) {
  const [first, second] = ranked(point);
  if (!first) return make("td");
  const gap = second ? second[1] / first[1] : null, tie = gap !== null && gap <= 1 + table.noise;
  const says = gap === null ? "only one" : tie ? `tie: ${second[0]}` : `${gap.toFixed(2)}×`;
  const button = make("button", { type: "button", tabIndex: -1 }, make("b", { textContent: first[0] }), says);
  button.style.setProperty("--c", tie ? "var(--kept)" : colourOf(first[0]));
  button.style.setProperty("--s", `${gap === null || tie ? 30 : Math.round(20 + 30 * Math.min((gap - 1) / 1.5, 1))}%`);
  button.setAttribute("aria-pressed", "false");
  button.dataset.length = lengthOf(phase, point); // grouped cells have no column headings
  button.title = ranked(point).map(([name, us]) => `${name}: ${microseconds(us)}`).join("\n");
  button.addEventListener("click", () => pick(button, phase, point));
  return make("td", {}, button);
}

function heat(phase) {
  const points = phaseOf(phase).points, box = find("heat");
  find("unmeasured").hidden = points.length > 0;
  find("heat-hint").hidden = !points.length;
  if (!points.length) return box.replaceChildren();
  const batches = [...new Set(points.map((point) => point.batch))].sort((a, b) => a - b);
  const order = (a, b) => a.query_len - b.query_len || a.kv_len - b.kv_len;
  const lengths = [...new Set([...points].sort(order).map((point) => lengthOf(phase, point)))];
  const at = new Map(points.map((point) => [`${point.batch} ${lengthOf(phase, point)}`, point]));
  const head = make("tr", {}, make("td"), ...lengths.map((text) => make("th", { scope: "col", textContent: text })));
  const body = batches.map((batch) => {
    const cells = lengths.map((length) => (at.has(`${batch} ${length}`) ? cell(phase, at.get(`${batch} ${length}`)) : make("td")));
    return make("tr", {}, make("th", { scope: "row", textContent: several(batch, "sequence") }), ...cells);
  });
  const caption = make("caption", { className: "away", textContent: `Fastest backend for ${phase}; arrow keys move between cells` });
  box.replaceChildren(make("table", {}, caption, make("thead", {}, head), make("tbody", {}, ...body)));
  box.querySelector("button")?.setAttribute("tabindex", "0"); // one stop of the Tab key; arrow keys move inside
  fit();
}

/** Group the cells by number of sequences if the table is wider than its place. */
function fit() {
  const box = find("heat");
  box.classList.remove("grouped");
  box.classList.toggle("grouped", box.scrollWidth > box.clientWidth);
}

function move(event) {
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  const here = event.target.closest("td");
  if (!step || !here) return;
  event.preventDefault();
  const rows = [...here.closest("tbody").rows];
  let row = rows.indexOf(here.parentElement), column = here.cellIndex, cell, next;
  do {
    cell = rows[(row += step[0])]?.cells[(column += step[1])];
    next = cell?.querySelector("button");
  } while (cell && !next); // points that were not measured are skipped
  if (!next) return;
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

function pick(button, phase, point) {
  find("heat").querySelector("[aria-pressed=true]")?.setAttribute("aria-pressed", "false");
  button.setAttribute("aria-pressed", "true");
  find("batch").value = point.batch;
  find("query-len").value = point.query_len;
  find("kv-len").value = point.kv_len;
  lookUp();
}

function bars(ranking) {
  const slowest = Math.max(...ranking.map((each) => each.us));
  const box = make("div", { className: "bars" });
  for (const { backend, us } of ranking) {
    const bar = make("i");
    bar.style.setProperty("--c", colourOf(backend));
    bar.style.setProperty("--w", `${Math.max((100 * us) / slowest, 1)}%`);
    box.append(make("span", { textContent: backend }), bar, make("span", { textContent: microseconds(us) }));
  }
  return box;
}

async function lookUp() {
  const phase = find("phase").value, length = Number(find("kv-len").value);
  const fresh = phase === "prefill" ? length : Number(find("query-len").value);
  const query = new URLSearchParams({ phase, batch: find("batch").value, query_len: fresh, kv_len: length });
  const answer = find("answer"), mine = ++asked;
  try {
    const found = await (await call(`/headway/explain?${query}`)).json();
    if (mine !== asked) return;
    const name = taken(found);
    const text = make("p", {}, make("strong", { textContent: name }), ` — ${reason(found, name)}`);
    answer.replaceChildren(text, ...(found.ranking.length ? [bars(found.ranking)] : []));
  } catch (error) {
    if (mine === asked) answer.replaceChildren(make("p", { textContent: error.message }));
  }
}

/** List the backends that cannot run: those with the same reasons together, each with its phases unless it is all of them. */
function refused() {
  const whys = {}; // reasons -> backend -> phases
  for (const { phase, refused } of table.phases) {
    for (const { backend, reasons } of refused) ((whys[reasons.join("; ")] ??= {})[backend] ??= []).push(phase);
  }
  const name = ([backend, phases]) => (phases.length === table.phases.length ? backend : `${backend} (${phases.join(", ")})`);
  const rows = Object.entries(whys).map(([why, who]) => [make("dt", { textContent: Object.entries(who).map(name).join(", ") }), make("dd", { textContent: why })]);
  find("refused").replaceChildren(...rows.flat());
  find("refused").parentElement.hidden = !rows.length;
}

/** Show the choice for each kind of layer and phase if the layers are of several kinds. */
function plan() {
  const rows = table.plan, names = rows.length ? Object.keys(rows[0]) : [];
  find("plan").hidden = new Set(rows.map((each) => each.kind)).size < 2;
  const line = (texts, cell) => make("tr", {}, ...texts.map((text) => make(cell, { textContent: text })));
  find("plan").tHead.replaceChildren(line(names.map((name) => name.replace("_size", "")), "th"));
  find("plan").tBodies[0].replaceChildren(...rows.map((each) => line(Object.values(each), "td")));
}

function showPhase() {
  const phase = find("phase").value;
  find("query-label").hidden = phase === "prefill";
  find("query-len").value = phase === "extend" ? 64 : 1;
  heat(phase);
  lookUp();
}

/** found: the answer of /headway/table. */
export function showTable(found) {
  table = found;
  backends = [...new Set(table.phases.flatMap((each) => [...each.backends, ...each.points.flatMap((point) => Object.keys(point.us))]))];
  find("facts").textContent = `${table.served_as.join(", ")} on ${table.device}; kv_layout ${table.layout}, block_size ${table.block_size}; version ${table.version}`;
  plan();
  const mostly = find("plan").hidden ? "" : ` Times and reasons on this page apply to the kind with the most layers, ${table.kind}.`;
  find("why").textContent = `Chosen at the start (${table.why}).${mostly}`;
  const isMeasured = table.noise !== null;
  find("look-up").hidden = find("answer").hidden = !isMeasured;
  find("unmeasured").textContent = isMeasured
    ? "No step of this phase was measured. headway bench crossover measures all phases."
    : "This table is empty: no attention backend was measured for this model, layout and block size. To fill it, start the server with --attn-backend auto (the default) and without --no-autotune: the first start measures the backends and saves their times.";
  find("heat-hint").textContent = `Color: the fastest backend. Its depth and the number: the lead; at 1.50× the next backend takes 1.5 times as long. Grey: a tie within the noise of ${rounded(100 * table.noise)} %. “4 of 64”: 4 new tokens, 60 cached. Times are for the attention of ${several(table.layers, "layer")} in a step.`;
  find("phase").replaceChildren(...table.phases.map(({ phase }) => make("option", { value: phase, textContent: phase })));
  find("phase").value = "decode";
  find("phase").addEventListener("change", showPhase);
  find("look-up").addEventListener("submit", (event) => {
    event.preventDefault();
    lookUp();
  });
  find("heat").addEventListener("keydown", move);
  addEventListener("resize", fit);
  refused();
  showPhase();
}
