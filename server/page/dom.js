// Helpers for all parts of the page: elements, numbers in words, colours, and requests with the API key.

export const find = (id) => document.getElementById(id);

/** An element with properties and children. Texts become text nodes: nothing that comes from outside is ever parsed as markup. */
export function make(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children.filter((child) => child !== null));
  return element;
}

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const FINE = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

export const count = (number) => WHOLE.format(number);
export const rounded = (number) => (Math.abs(number) < 100 ? FINE : WHOLE).format(number);
export const share = (part, whole) => (whole > 0 ? `${rounded((100 * part) / whole)} %` : "–");
export const several = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
export const microseconds = (us) => (us < 1000 ? `${rounded(us)} µs` : `${rounded(us / 1000)} ms`);

/** The n-th colour of a series: neighbours differ in hue, and all are legible in both themes. */
export const colour = (n) => `hsl(${(n * 137.5 + 168) % 360} 55% 48%)`;

const KEY = "headway-api-key";

export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => (key ? sessionStorage.setItem(KEY, key) : sessionStorage.removeItem(KEY)),
};

/** An error response of the server, with its message. */
export class ApiFailure extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** fetch with the API key. Throws ApiFailure with the server's message. */
export async function call(path, options = {}) {
  const key = apiKey.get();
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const answer = await fetch(path, { ...options, headers });
  if (answer.ok) return answer;
  let message = `the server answered with status ${answer.status}`;
  try {
    message = (await answer.json()).error?.message ?? message;
  } catch {
    // the body is not JSON: show the status
  }
  if (answer.status === 401) document.dispatchEvent(new Event("key-wanted"));
  throw new ApiFailure(answer.status, message);
}
