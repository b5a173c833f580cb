// Puts the page together: theme, API key, and the second's beat that asks the server how it is.

import { showSampling, startChat } from "./chat.js";
import { apiKey, call, find } from "./dom.js";
import { showState } from "./live.js";
import { showTable } from "./table.js";

const SECOND = 1000;
const THEMES = ["system", "light", "dark"];

function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  find("theme").textContent = `Theme: ${theme}`;
  localStorage.setItem("headway-theme", theme);
}

function startTheme() {
  const kept = localStorage.getItem("headway-theme");
  let at = Math.max(THEMES.indexOf(kept), 0);
  setTheme(THEMES[at]);
  find("theme").addEventListener("click", () => setTheme(THEMES[(at = (at + 1) % THEMES.length)]));
}

function tell(text, bad) {
  const said = find("connection");
  if (said.textContent !== text) said.textContent = text; // a screen reader hears changes alone
  said.classList.toggle("bad", bad);
}

let table = null;
let beating = null;

/** One look at the server. A beat that is asked for during another is that one: the table is shown once. */
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
    if (error.status === 401) return; // the key's form tells of it
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
    if (again) {
      apiKey.set("");
      tell("this API key is not valid", true);
    } else tell("an API key is needed", true);
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
