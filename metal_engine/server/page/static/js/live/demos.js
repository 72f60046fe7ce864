// Three demonstrations of the engine: requests that share steps, a prompt in chunks, and a full cache.

import { chunks, forModel, request } from "../api.js";
import { byId, count } from "../dom.js";

const QUESTIONS = [
  "Why is the sky blue?", "How do bees find their way?", "What is a prime number?", "Who built the first bridges?",
  "How does bread rise?", "What makes a violin sound?", "Why do leaves turn red?", "How far away is the moon?",
];
const WORDS = "river stone lamp winter engine paper garden signal copper bridge violet harbor thunder silver meadow".split(" ");
// Length of a long prompt as a multiple of the tokens of a step, and number of chats that run meanwhile.
const LONG_STEPS = 4;
const CHATS = 4;
const CHAT_TOKENS = 128;
// Maximum size of a pool in tokens for the demonstration of a full cache. Filling a larger pool takes too long.
const FILLABLE = 60_000;
const MAX_REQUESTS = 16;

export class Demos {
  /** `facts()` returns the latest snapshot; null while no model is loaded. */
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

  /** Enable the demonstrations if there is an engine and no demonstration is running. */
  refresh() {
    for (const button of this.buttons) button.disabled = this.isRunning || this.facts() === null;
  }

  say(text) {
    byId("demo-status").hidden = !text;
    byId("demo-status").textContent = text;
  }

  /** Show the number of tokens of at most `max`. Screen readers do not announce it, because it changes with each token. */
  progress(value, max, more = "") {
    byId("demo-progress").hidden = false;
    Object.assign(byId("demo-bar"), { value, max });
    byId("demo-counts").textContent = `${count(value)} of ${count(max)} tokens${more}`;
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
      byId("demo-progress").hidden = true;
      byId("demo-stop").hidden = true;
    }
  }

  /**
   * Stream the answers to prompts. Each prompt is a separate request in the engine. Yields {choices, tokens}: the choices
   * of a chunk, and the number of tokens of all answers so far.
   *
   * All prompts are sent in one body, since browsers open few connections to a server.
   */
  async *answers(prompts, options) {
    const body = { ...options, prompt: prompts, stream_options: { include_usage: true, continuous_usage_stats: true } };
    let tokens = 0;
    for await (const { choices, usage } of chunks("/v1/completions", body, this.abort.signal)) {
      tokens = usage?.completion_tokens ?? tokens;
      yield { choices, tokens };
    }
  }

  /** Answer prompts and show their progress; `more()` returns additional text. Returns a text with tokens and time. */
  async together(prompts, options, what, more) {
    const started = performance.now();
    const most = prompts.length * options.max_tokens;
    let [done, all] = [0, 0];
    this.say(`${what}: 0 of ${prompts.length} are done.`);
    for await (const { choices, tokens } of this.answers(prompts, options)) {
      const ended = choices.filter((choice) => choice.finish_reason).length;
      [done, all] = [done + ended, tokens];
      this.progress(tokens, most, more?.());
      if (ended) this.say(`${what}: ${done} of ${prompts.length} are done.`);
    }
    const seconds = (performance.now() - started) / 1000;
    return `${count(all)} tokens in ${seconds.toFixed(1)} s, ${Math.round(all / seconds)} a second`;
  }

  /** Return the token ids of the first questions, formatted with the model's chat template. */
  questions(number) {
    const asked = QUESTIONS.slice(0, number);
    return Promise.all(asked.map((content) => this.tokens({ messages: [{ role: "user", content }] })));
  }

  async eight() {
    const { limits } = this.facts();
    const most = Math.min(48, Math.floor(limits.max_model_len / 4));
    const told = await this.together(await this.questions(8), { max_tokens: most }, "Eight questions");
    this.say(`Eight questions shared their steps: ${told}.`);
  }

  async long() {
    const { limits, pool } = this.facts();
    const budget = limits.max_num_batched_tokens;
    const questions = await this.questions(Math.max(Math.min(CHATS, limits.max_num_seqs - 1), 1));
    const chatTokens = Math.min(CHAT_TOKENS, Math.floor(limits.max_model_len / 4));
    const taken = questions.reduce((sum, one) => sum + one.length + chatTokens + pool.block_size, 0);
    const room = Math.min(limits.max_model_len - 32, pool.num_blocks * pool.block_size - taken);
    const prompt = await this.prompt(Math.max(Math.min(LONG_STEPS * budget, room), 1));
    const what = `A prompt of ${count(prompt.length)} tokens`;
    this.say(`${questions.length} chats begin.`);
    const chats = new Chats(this.answers(questions, { max_tokens: chatTokens, ignore_eos: true }), questions.length);
    await chats.started;
    this.say(`${what} goes through, beside ${questions.length} chats.`);
    const [started, before] = [performance.now(), chats.tokens];
    for await (const { tokens } of this.answers([prompt], { max_tokens: 24 })) {
      if (!tokens) continue;
      const seconds = (performance.now() - started) / 1000;
      this.say(
        `${what} went through in ${seconds.toFixed(1)} s. A step has room for ${count(budget)}. ` +
          `Meanwhile ${questions.length} chats got ${count(chats.tokens - before)} tokens.`,
      );
      return; // stops the answer and the chats
    }
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
    // Half of the pool is for prompts, so that all are admitted. With their outputs they exceed the pool.
    const requests = Math.max(2, Math.min(limits.max_num_seqs, Math.floor(pool.num_blocks / 8), MAX_REQUESTS));
    const each = Math.min(Math.ceil((1.5 * room) / requests), room - pool.block_size, limits.max_model_len);
    const prompts = [];
    for (let i = 0; i < requests; i += 1) prompts.push(await this.prompt(Math.max(Math.floor(each / 2), 1)));
    const before = facts.stats.preemptions;
    const preempted = () => (this.facts() ?? facts).stats.preemptions - before;
    const options = { max_tokens: Math.max(each - prompts[0].length, 1), ignore_eos: true };
    const what = `${requests} requests for more room than there is`;
    const told = await this.together(prompts, options, what, () => `, ${count(preempted())} preemptions`);
    // The frame of the last steps may arrive after the answers.
    const last = this.facts()?.stats;
    for (let i = 0; i < 20 && this.facts()?.stats === last; i += 1) await new Promise((done) => setTimeout(done, 50));
    this.say(`The cache was full: ${count(preempted())} preemptions, and every request got its whole answer (${told}).`);
  }

  /** Return the token ids of a text that was not sent before. */
  async prompt(length) {
    const words = Array.from({ length: length + 16 }, () => WORDS[Math.floor(Math.random() * WORDS.length)]);
    return (await this.tokens({ prompt: words.join(" ") })).slice(0, length);
  }

  async tokens(body) {
    return (await (await request("/tokenize", { body: forModel(body), signal: this.abort.signal })).json()).tokens;
  }
}

/** Chats that run in the background. `started` resolves when every chat has a token, or when all have ended. */
class Chats {
  constructor(answers, number) {
    this.tokens = 0;
    this.begun = new Set();
    this.started = new Promise((resolve, reject) => {
      this.read(answers, number, resolve).then(resolve, reject);
    });
  }

  async read(answers, number, start) {
    for await (const { choices, tokens } of answers) {
      this.tokens = tokens;
      for (const { index } of choices) this.begun.add(index);
      if (this.begun.size === number) start();
    }
  }
}
