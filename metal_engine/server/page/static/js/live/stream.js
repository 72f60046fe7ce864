// The connection to /watch: open while the page is visible, closed while it is hidden.

import { events, modelQuery, request } from "../api.js";
import { withKey } from "../key.js";

const HIDDEN_SECONDS = 10;
const RETRY_SECONDS = [0.5, 1, 2, 5, 10];

/**
 * Reads /watch forever, and passes its events to `listener`: `snapshot(data)`, `frame(data)` and
 * `connection(state, text)`. Before each attempt to connect, it awaits `listener.ready(say, isFirst)`, which may call `say`
 * with the reason for waiting.
 */
export class LiveStream {
  constructor(listener) {
    this.listener = listener;
    this.abort = null;
    this.wake = () => {};
    document.addEventListener("visibilitychange", () => this.visibilityChanged());
  }

  async run() {
    for (let failures = 0, isFirst = true; ; failures += 1, isFirst = false) {
      while (document.hidden) await new Promise((resolve) => (this.wake = resolve));
      try {
        await this.listener.ready((text) => this.listener.connection("paused", text), isFirst);
        this.abort = new AbortController();
        const response = await withKey(() => request(`/watch${modelQuery()}`, { signal: this.abort.signal }));
        this.listener.connection("live", "live");
        for await (const { event, data } of events(response)) {
          failures = 0;
          if (event === "snapshot") this.listener.snapshot(JSON.parse(data));
          else if (event === "frame") this.listener.frame(JSON.parse(data));
        }
        this.listener.connection("lost", "the server has ended the live view");
      } catch (error) {
        if (error.name === "AbortError") {
          this.listener.connection("paused", "paused");
          continue;
        }
        this.listener.connection("lost", error.message);
      }
      const seconds = RETRY_SECONDS[Math.min(failures, RETRY_SECONDS.length - 1)];
      await new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
    }
  }

  /** Watch another model. */
  begin() {
    this.abort?.abort();
  }

  visibilityChanged() {
    clearTimeout(this.timer);
    if (document.hidden) this.timer = setTimeout(() => this.abort?.abort(), 1000 * HIDDEN_SECONDS);
    else this.wake();
  }
}
