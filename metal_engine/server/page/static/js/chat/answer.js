// One answer in progress: converts the stream's chunks to a message with timings and token counts.

import { chunks } from "../api.js";
import { withKey } from "../key.js";

/**
 * Streams an answer into `message` of `conversation`. Calls `changed(part)` for each change: "text" for more text, "loading"
 * while the model is being loaded, "end" for the end.
 * `serverId` is the server's id of the answer; null until the server has accepted the request.
 */
export class Answer {
  constructor(message, conversation, changed) {
    this.message = message;
    this.conversation = conversation;
    this.changed = changed;
    this.abort = new AbortController();
    this.serverId = null;
  }

  stop() {
    this.abort.abort();
  }

  /** Request the answer. `messages()` resolves to the messages to send. */
  async run(parameters, messages) {
    const { message } = this;
    const started = performance.now();
    let [first, last] = [0, 0];
    try {
      const body = { ...parameters, messages: await messages() };
      await withKey(async () => {
        const options = { ...body, stream_options: { include_usage: true, continuous_usage_stats: true } };
        const told = { begun: (id) => (this.serverId = id), loading: () => this.changed("loading") };
        for await (const chunk of chunks("/v1/chat/completions", options, this.abort.signal, told)) {
          if (chunk.usage) message.usage = chunk.usage;
          if (chunk.model) message.model = chunk.model;
          for (const { delta, finish_reason: reason } of chunk.choices) {
            if (reason) message.reason = reason;
            if (!this.take(delta)) continue;
            last = performance.now();
            first ||= last;
            message.figures = figures(message.usage, (first - started) / 1000, (last - first) / 1000);
            this.changed("text");
          }
        }
      });
      message.state = "done";
    } catch (error) {
      const isStopped = error.name === "AbortError";
      message.state = isStopped ? "stopped" : "failed";
      message.problem = isStopped ? "stopped" : error.message;
    }
    if (first) message.figures = figures(message.usage, (first - started) / 1000, (last - first) / 1000);
    this.changed("end");
  }

  /** Add the content of a chunk. Return true if there was any. */
  take(delta) {
    const { message } = this;
    message.content += delta.content ?? "";
    message.reasoning += delta.reasoning ?? "";
    for (const { index, id, function: called } of delta.tool_calls ?? []) {
      const call = (message.calls[index] ??= { id, name: "", text: "" });
      call.name += called?.name ?? "";
      call.text += called?.arguments ?? "";
    }
    return Boolean(delta.content || delta.reasoning || delta.tool_calls);
  }
}

function figures(usage, firstSeconds, laterSeconds) {
  if (!usage) return null;
  const tokens = usage.completion_tokens;
  return {
    firstSeconds,
    perSecond: tokens > 1 && laterSeconds > 0 ? (tokens - 1) / laterSeconds : null,
    tokens,
    promptTokens: usage.prompt_tokens,
    cachedTokens: usage.prompt_tokens_details?.cached_tokens ?? 0,
    imageTokens: usage.prompt_tokens_details?.image_tokens ?? 0,
  };
}
