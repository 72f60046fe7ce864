// Three buttons that show what the engine does: requests that share steps, a prompt in chunks, a cache that is full.

import { chunks, forModel, request } from "../api.js";
import { byId, count } from "../dom.js";

const QUESTIONS = [
  "Why is the sky blue?", "How do bees find their way?", "What is a prime number?", "Who built the first bridges?",
  "How does bread rise?", "What makes a violin sound?", "Why do leaves turn red?", "How far away is the moon?",
];
const WORDS = "river stone lamp winter engine paper garden signal copper bridge violet harbor thunder silver meadow".split(" ");
const LONG_PROMPT = 2000;
// A pool with room for more than this many tokens takes too long to fill for a demonstration.
const FILLABLE = 60_000;
const MAX_REQUESTS = 16;

export class Demos {
  /** `facts()` has the last snapshot; null while there is no engine to look at. */
  constructor(facts) {
    this.facts = facts;
    this.abort = null;
    this.isRunning = false;
    this.buttons = ["demo-eight", "demo-long", "demo-fill"].map(byId);
    this.refresh();
    byId("demo-eight").addEventListener("click", () => this.run(() => this.eight()));
    byId("demo-long").addEventListener("click", () => this.run(() => this.long()));
    byId("demo-fill").addEventListener("click", () => this.run(() => this.fill()));
    byId("demo-stop").addEventListener("click", () => this.abort?.abort());
  }

  /** Offer the demonstrations if there is an engine for them, and none is under way. */
  refresh() {
    for (const button of this.buttons) button.disabled = this.isRunning || this.facts() === null;
  }

  say(text) {
    byId("demo-status").hidden = !text;
    byId("demo-status").textContent = text;
  }

  async run(demo) {
    this.abort = new AbortController();
    this.isRunning = true;
    this.refresh();
    byId("demo-stop").hidden = false;
    try {
      await demo();
    } catch (error) {
      this.say(error.name === "AbortError" ? "Stopped." : `It did not work: ${error.message}`);
    } finally {
      this.abort.abort();
      this.isRunning = false;
      this.refresh();
      byId("demo-stop").hidden = true;
    }
  }

  /**
   * Stream the answers to prompts, each of which is a request of its own to the engine; returns what it took.
   *
   * They go as one body, since browsers open few connections to a server.
   */
  async stream(prompts, options, what) {
    const started = performance.now();
    let [done, tokens] = [0, 0];
    const body = { ...options, prompt: prompts, stream_options: { include_usage: true } };
    this.say(`${what}: 0 of ${prompts.length} are done.`);
    for await (const { choices, usage } of chunks("/v1/completions", body, this.abort.signal)) {
      done += choices.filter((choice) => choice.finish_reason).length;
      tokens = usage?.completion_tokens ?? tokens;
      if (choices.some((choice) => choice.finish_reason)) this.say(`${what}: ${done} of ${prompts.length} are done.`);
    }
    const seconds = (performance.now() - started) / 1000;
    return `${count(tokens)} tokens in ${seconds.toFixed(1)} s, ${Math.round(tokens / seconds)} a second`;
  }

  async eight() {
    const { limits } = this.facts();
    const prompts = await Promise.all(QUESTIONS.map((content) => this.tokens({ messages: [{ role: "user", content }] })));
    const most = Math.min(48, Math.floor(limits.max_model_len / 4));
    const told = await this.stream(prompts, { max_tokens: most }, "Eight questions");
    this.say(`Eight questions shared their steps: ${told}.`);
  }

  async long() {
    const room = this.facts().limits.max_model_len - 32;
    const prompt = await this.prompt(Math.min(LONG_PROMPT, room));
    const what = `A prompt of ${count(prompt.length)} tokens`;
    const told = await this.stream([prompt], { max_tokens: 24 }, what);
    this.say(`${what} went through, a chunk in each step: ${told}.`);
  }

  async fill() {
    const facts = this.facts();
    const { pool, limits } = facts;
    const room = pool.num_blocks * pool.block_size;
    if (room > FILLABLE) {
      const blocks = Math.max(64, Math.ceil(limits.max_model_len / pool.block_size));
      this.say(
        `This cache has room for ${count(room)} tokens, which takes too long to fill. ` +
          `Start the server with --num-gpu-blocks-override ${blocks} to see it full.`,
      );
      return;
    }
    // Half of it is prompts, so that all are admitted; they outgrow the pool together.
    const requests = Math.max(2, Math.min(limits.max_num_seqs, Math.floor(pool.num_blocks / 8), MAX_REQUESTS));
    const each = Math.min(Math.ceil((1.5 * room) / requests), room - pool.block_size, limits.max_model_len);
    const prompts = [];
    for (let i = 0; i < requests; i += 1) prompts.push(await this.prompt(Math.max(Math.floor(each / 2), 1)));
    const before = facts.stats.preemptions;
    const options = { max_tokens: Math.max(each - prompts[0].length, 1), ignore_eos: true };
    const told = await this.stream(prompts, options, `${requests} requests for more room than there is`);
    const preemptions = (this.facts() ?? facts).stats.preemptions - before;
    this.say(`The cache was full: ${count(preemptions)} preemptions, and every request got its whole answer (${told}).`);
  }

  /** Token ids of a text that nobody has sent before. */
  async prompt(length) {
    const words = Array.from({ length: length + 16 }, () => WORDS[Math.floor(Math.random() * WORDS.length)]);
    return (await this.tokens({ prompt: words.join(" ") })).slice(0, length);
  }

  async tokens(body) {
    return (await (await request("/tokenize", { body: forModel(body), signal: this.abort.signal })).json()).tokens;
  }
}
