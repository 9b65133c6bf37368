// Talking to the server, with the API key of this tab if it wants one.

import { $ } from "./dom.js";

const KEY = "homing-api-key";

export async function ask(path, options = {}) {
  const key = sessionStorage.getItem(KEY);
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  if (response.status === 401 && !$("#key").open) $("#key").showModal();
  const body = await response.json().catch(() => null);
  throw new Error(body?.error?.message ?? `the server answers ${response.status}`);
}

$("#key form").addEventListener("submit", () => {
  sessionStorage.setItem(KEY, $("#key-value").value.trim());
});
