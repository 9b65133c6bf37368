// The live page: polls /fleet while it is visible, and chats with the model.

import "./chat.js";
import { showFleet, showStatus } from "./fleet.js";
import { remember } from "./samples.js";
import { ask } from "./server.js";

const POLL_MS = 1000;

async function poll() {
  try {
    const response = await ask("fleet", { signal: AbortSignal.timeout(5 * POLL_MS) });
    remember(await response.json());
    showFleet();
  } catch (error) {
    const silent = error instanceof TypeError || error.name === "TimeoutError";
    showStatus("bad", silent ? "the server does not answer" : error.message);
  }
}

async function pollWhileVisible() {
  for (;;) {
    if (document.hidden) {
      await new Promise((resume) =>
        document.addEventListener("visibilitychange", resume, { once: true }),
      );
      continue;
    }
    await poll();
    await new Promise((resume) => setTimeout(resume, POLL_MS));
  }
}

pollWhileVisible();
