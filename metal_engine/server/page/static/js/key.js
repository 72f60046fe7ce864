// Asks the user for the server's key, once for all concurrent requests.

import { hasKey, setKey } from "./api.js";
import { byId } from "./dom.js";

let asking = null;

/** Resolves when the user has entered a key. */
export function askForKey() {
  asking ??= new Promise((resolve) => {
    const [dialog, form, field, problem] = ["key-dialog", "key-form", "key", "key-problem"].map(byId);
    problem.hidden = !hasKey();
    problem.textContent = "The server does not accept this key.";
    field.value = "";
    dialog.oncancel = (event) => event.preventDefault(); // the page has no content without a key
    form.onsubmit = () => {
      setKey(field.value.trim());
      asking = null;
      resolve();
    };
    dialog.showModal();
  });
  return asking;
}

/** Return the result of `work`. If the server rejects the key, ask the user for another key and repeat `work`. */
export async function withKey(work) {
  while (true) {
    try {
      return await work();
    } catch (error) {
      if (error.status !== 401) throw error;
      await askForKey();
    }
  }
}
