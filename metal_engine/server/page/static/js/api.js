// Requests to the server this page came from, with the key that the user gave.

const KEY = "metal-engine.key";

/** An answer that is an error; `status` is 0 if there was none. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

let model = null;
let watched = null;

/** Talk to one of several models, or to an adapter, from now on; `isWatched` for a model that has an engine of its own. */
export function useModel(name, isWatched) {
  model = name;
  watched = isWatched ? name : null;
}

/** What names the model to look at in a query; nothing where the server has only one. */
export const modelQuery = () => (watched === null ? "" : `?model=${encodeURIComponent(watched)}`);

/** A body that is for the model to talk to. */
export const forModel = (body) => (model === null ? body : { model, ...body });

let key = sessionStorage.getItem(KEY) ?? "";

export const hasKey = () => key !== "";

/** Remember a key for as long as the tab is open. */
export function setKey(given) {
  key = given;
  sessionStorage.setItem(KEY, given);
}

/** A request; its body, if it has one, is JSON. Throws ApiError unless the answer is a success. */
export async function request(path, { body, signal } = {}) {
  const headers = { "x-metal-engine-page": "1" }; // a page of another origin cannot send it
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    const method = body === undefined ? "GET" : "POST";
    response = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "the server does not answer");
  }
  if (response.ok) return response;
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not JSON: the status says it
  }
  throw new ApiError(response.status, message);
}

/** The server-sent events of an answer: {event, data}, data as text; a comment is one of the name "comment". */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    while (true) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const one = { event: "message", data: "" };
        for (const line of block.split("\n")) {
          if (line.startsWith("event: ")) one.event = line.slice(7);
          else if (line.startsWith("data: ")) one.data += line.slice(6);
          else if (line.startsWith(": ")) Object.assign(one, { event: "comment", data: line.slice(2) });
        }
        if (one.data) yield one;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/**
 * A stream of OpenAI's chunks: each as an object, until `[DONE]`. Throws ApiError for an error within it.
 *
 * `begun` is called with the answer's id as soon as the server has taken the request in, `loading` whenever it says that the
 * model is being loaded for it.
 */
export async function* chunks(path, body, signal, { begun = () => {}, loading = () => {} } = {}) {
  const response = await request(path, { body: forModel({ ...body, stream: true }), signal });
  begun(response.headers.get("x-generation-id"));
  for await (const { event, data } of events(response)) {
    if (event === "comment") {
      if (data.startsWith("loading ")) loading();
      continue;
    }
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(500, chunk.error.message);
    yield chunk;
  }
  throw new ApiError(0, "the connection ended before the answer did");
}
