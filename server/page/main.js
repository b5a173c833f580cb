// Starts the page: theme, API key, and a request for the engine's state every second.

import { showSampling, startChat } from "./chat.js";
import { apiKey, call, find } from "./dom.js";
import { showState } from "./live.js";
import { showTable } from "./table.js";

const SECOND = 1000;
const THEMES = ["system", "light", "dark"];

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  find("theme").textContent = `Theme: ${theme}`;
  localStorage.setItem("headway-theme", theme);
}

function startTheme() {
  let at = Math.max(THEMES.indexOf(localStorage.getItem("headway-theme")), 0);
  setTheme(THEMES[at]);
  find("theme").addEventListener("click", () => setTheme(THEMES[(at = (at + 1) % THEMES.length)]));
}

function tell(text, bad) {
  const said = find("connection");
  if (said.textContent !== text) said.textContent = text; // a screen reader announces changes only
  said.classList.toggle("bad", bad);
}

let table = null;
let beating = null;

/** Ask the server for its state. A call during another one shares it, so that the table is shown once. */
function beat() {
  beating ??= look().finally(() => (beating = null));
  return beating;
}

async function look() {
  if (document.hidden || (document.documentElement.dataset.key === "required" && !apiKey.get())) return;
  try {
    if (table === null) {
      table = await (await call("/headway/table")).json();
      showTable(table);
      showSampling(table.sampling);
    }
    showState(await (await call("/headway/state")).json(), table);
    tell("connected", false);
  } catch (error) {
    if (error.status === 401) return; // the key's form says so
    tell(error.status ? error.message : "no connection", true);
  }
}

async function keepBeating() {
  await beat();
  setTimeout(keepBeating, SECOND);
}

function startKey() {
  const form = find("key-form");
  const ask = (again) => {
    form.hidden = false;
    find("key").setCustomValidity("");
    apiKey.set("");
    tell(again ? "this API key is not valid" : "an API key is needed", true);
    find("key").focus();
  };
  if (document.documentElement.dataset.key === "required" && !apiKey.get()) ask(false);
  document.addEventListener("key-wanted", () => ask(true));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    apiKey.set(find("key").value);
    find("key").value = "";
    form.hidden = true;
    find("prompt").focus();
    await beat();
  });
}

startTheme();
startKey();
startChat(() => table);
document.addEventListener("visibilitychange", beat);
keepBeating();
