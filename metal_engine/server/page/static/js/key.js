// Asking for the server's key, once for all who need it.

import { hasKey, setKey } from "./api.js";
import { byId } from "./dom.js";

let asking = null;

/** Resolves when the user has given a key. */
export function askForKey() {
  asking ??= new Promise((resolve) => {
    const [dialog, form, field, problem] = ["key-dialog", "key-form", "key", "key-problem"].map(byId);
    problem.hidden = !hasKey();
    problem.textContent = "The server does not take this key.";
    field.value = "";
    dialog.oncancel = (event) => event.preventDefault(); // there is nothing to see without it
    form.onsubmit = () => {
      setKey(field.value.trim());
      asking = null;
      resolve();
    };
    dialog.showModal();
  });
  return asking;
}

/** What `work` returns; whenever the server refuses the key, the user is asked for another and it is done again. */
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
