// The crossover table: where which backend is fastest, and what it says of any step.

import { call, colour, count, find, make, microseconds } from "./dom.js";
import { reason, taken } from "./live.js";

let table = null;
let backends = [];
let pressed = null;
let asked = 0; // questions so far: only the last one's answer is shown, whichever comes last

const colourOf = (name) => colour(backends.indexOf(name));
const phaseOf = (name) => table.phases.find((each) => each.phase === name);

function ranked(point) {
  const timed = Object.entries(point.us).filter(([, us]) => us !== null);
  return timed.sort((a, b) => a[1] - b[1]);
}

function lengthOf(phase, point) {
  if (phase === "prefill") return count(point.query_len);
  return point.query_len > 1 ? `${count(point.query_len)} of ${count(point.kv_len)}` : count(point.kv_len);
}

/** A cell of the heat-map: the winner, and how far the next one is behind. */
function cell(phase, point) {
  const [first, second] = ranked(point);
  if (!first) return make("td");
  const gap = second ? second[1] / first[1] : null, tie = gap !== null && gap <= 1 + table.noise;
  const says = gap === null ? "alone" : tie ? `= ${second[0]}` : `${gap.toFixed(2)} times`;
  const button = make("button", { type: "button", tabIndex: -1 }, make("b", { textContent: first[0] }), says);
  button.style.setProperty("--c", tie ? "var(--kept)" : colourOf(first[0]));
  button.style.setProperty("--s", `${gap === null || tie ? 30 : Math.round(20 + 60 * Math.min((gap - 1) / 1.5, 1))}%`);
  button.setAttribute("aria-pressed", "false");
  button.title = ranked(point).map(([name, us]) => `${name}: ${microseconds(us)}`).join("\n");
  button.addEventListener("click", () => pick(button, phase, point));
  return make("td", {}, button);
}

function heat(phase) {
  const points = phaseOf(phase).points, box = find("heat");
  find("heat-hint").hidden = !points.length;
  if (!points.length) return box.replaceChildren();
  const batches = [...new Set(points.map((point) => point.batch))].sort((a, b) => a - b);
  const order = (a, b) => a.query_len - b.query_len || a.kv_len - b.kv_len;
  const lengths = [...new Set([...points].sort(order).map((point) => lengthOf(phase, point)))];
  const at = new Map(points.map((point) => [`${point.batch} ${lengthOf(phase, point)}`, point]));
  const head = make("tr", {}, make("th", { textContent: "sequences \\ tokens" }), ...lengths.map((text) => make("th", { scope: "col", textContent: text })));
  const body = batches.map((batch) => {
    const cells = lengths.map((length) => (at.has(`${batch} ${length}`) ? cell(phase, at.get(`${batch} ${length}`)) : make("td")));
    return make("tr", {}, make("th", { scope: "row", textContent: count(batch) }), ...cells);
  });
  const caption = make("caption", { className: "away", textContent: `Fastest backend in ${phase}; arrow keys move between cells` });
  box.replaceChildren(make("table", {}, caption, make("thead", {}, head), make("tbody", {}, ...body)));
  const first = box.querySelector("button");
  if (first) first.tabIndex = 0; // one stop for the Tab key; arrows move inside
}

function move(event) {
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  const here = event.target.closest("td");
  if (!step || !here) return;
  event.preventDefault();
  const rows = [...here.closest("tbody").rows];
  let row = rows.indexOf(here.parentElement), column = here.cellIndex, next = null;
  for (;;) {
    row += step[0];
    column += step[1];
    const found = rows[row]?.cells[column];
    if (!found) return;
    next = found.querySelector("button");
    if (next) break;
  }
  event.target.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

function pick(button, phase, point) {
  pressed?.setAttribute("aria-pressed", "false");
  button.setAttribute("aria-pressed", "true");
  pressed = button;
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
    const told = make("p", {}, make("strong", { textContent: name }), ` — ${reason(found, name, table)}`);
    answer.replaceChildren(told, ...(found.ranking.length ? [bars(found.ranking)] : []));
  } catch (error) {
    if (mine === asked) answer.replaceChildren(make("p", { textContent: error.message }));
  }
}

function refused() {
  const list = make("dl");
  for (const { phase, refused } of table.phases) {
    for (const { backend, reasons } of refused) {
      list.append(make("dt", { textContent: `${phase}: ${backend}` }), make("dd", { textContent: reasons.join("; ") }));
    }
  }
  if (!list.children.length) list.append(make("dd", { textContent: "None: all that were asked for can serve." }));
  find("refused").replaceChildren(list);
}

function showPhase() {
  const phase = find("phase").value;
  find("query-label").hidden = phase === "prefill";
  find("query-len").value = phase === "extend" ? 64 : 1;
  pressed = null;
  heat(phase);
  lookUp();
}

/** found: what /headway/table answers. */
export function showTable(found) {
  table = found;
  backends = [...new Set(table.phases.flatMap((each) => [...each.backends, ...each.points.flatMap((point) => Object.keys(point.us))]))];
  find("facts").textContent = `${table.served_as.join(", ")} on ${table.device}; kv_layout ${table.layout}, block_size ${table.block_size}; version ${table.version}`;
  const noise = table.noise === null ? "" : ` Times are those of the attention of all ${table.layers} layers in a step; “=” marks a tie within the noise of ${(100 * table.noise).toFixed(1)} %.`;
  const measure = table.noise === null ? " headway bench crossover measures a table, which auto then obeys." : "";
  find("table-why").textContent = `Chosen at the start: ${table.text}.${noise}${measure}`;
  find("phase").replaceChildren(...table.phases.map(({ phase }) => make("option", { value: phase, textContent: phase })));
  find("phase").value = "decode";
  find("phase").addEventListener("change", showPhase);
  find("look-up").addEventListener("submit", (event) => {
    event.preventDefault();
    lookUp();
  });
  find("heat").addEventListener("keydown", move);
  refused();
  showPhase();
}
