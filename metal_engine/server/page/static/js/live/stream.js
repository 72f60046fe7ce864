// The connection to /watch: kept while the page is seen, let go while it is not.

import { events, modelQuery, request } from "../api.js";
import { withKey } from "../key.js";

const HIDDEN_SECONDS = 10;
const RETRY_SECONDS = [0.5, 1, 2, 5, 10];

/**
 * Reads /watch for ever, and hands its events to `listener`: `snapshot(data)`, `frame(data)` and
 * `connection(state, text)`. Begins when `listener.ready(say, isFirst)` says that there is something to look at; it is
 * asked before each try to connect, and may `say` what it waits for.
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

  /** Look at another model. */
  begin() {
    this.abort?.abort();
  }

  visibilityChanged() {
    clearTimeout(this.timer);
    if (document.hidden) this.timer = setTimeout(() => this.abort?.abort(), 1000 * HIDDEN_SECONDS);
    else this.wake();
  }
}
