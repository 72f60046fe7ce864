// Sends requests to the server of this page, with the user's key.

const KEY = "metal-engine.key";

/** An error response; `status` is 0 if there was no response. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

let model = null;
let watched = null;

/** Select one of several models, or an adapter. `isWatched` is true for a model with its own engine. */
export function useModel(name, isWatched) {
  model = name;
  watched = isWatched ? name : null;
}

/** Return the query parameter of the watched model; empty if the server has only one. */
export const modelQuery = () => (watched === null ? "" : `?model=${encodeURIComponent(watched)}`);

/** Return a request body with the selected model. */
export const forModel = (body) => (model === null ? body : { model, ...body });

let key = sessionStorage.getItem(KEY) ?? "";

export const hasKey = () => key !== "";

/** Store a key while the tab is open. */
export function setKey(given) {
  key = given;
  sessionStorage.setItem(KEY, given);
}

/** Send a request with an optional JSON body. Throws ApiError for an error response. */
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
    throw new ApiError(0, "the server does not respond");
  }
  if (response.ok) return response;
  let message = `the server responded with status ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // not JSON: report the status only
  }
  throw new ApiError(response.status, message);
}

/** Yield the server-sent events of a response: {event, data}, data as text. Comments have the event name "comment". */
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
 * Yield the chunks of an OpenAI stream as objects, until `[DONE]`. Throws ApiError for an error in the stream.
 *
 * Calls `begun` with the response's id when the server has accepted the request, and `loading` whenever the server reports
 * that it is loading the model.
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
  throw new ApiError(0, "the connection ended before the end of the answer");
}
