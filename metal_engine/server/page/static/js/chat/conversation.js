// A conversation as a tree of messages. Editing a message, or repeating an answer, adds a branch and keeps the others.

let numMade = 0;
export const newId = () => `${Date.now().toString(36)}-${(numMade += 1)}-${Math.random().toString(36).slice(2, 8)}`;

const MAX_TITLE = 60;
// Maximum size of the image files of a request in bytes, as in the server.
const MAX_IMAGE_BYTES = 64 << 20;

/**
 * Messages by id. A message is {id, parent, role, content, children, chosen}. An answer also has {model, reasoning, calls,
 * figures, state, problem}. `chosen` is the child that is shown. The root is a message without a role. An answer's state is
 * "running", "done", "stopped" (by the user) or "failed". `problem` is the reason for the last two states. A user's message
 * can have images: a list of {id, name, size}.
 */
export class Conversation {
  constructor(saved = null) {
    this.id = saved?.id ?? newId();
    this.title = saved?.title ?? "New conversation";
    this.isNamed = saved?.isNamed ?? false; // by the user: then the title does not change when the first message is edited
    this.isDeleted = false;
    this.messages = saved?.messages ?? { root: { id: "root", children: [], chosen: null } };
  }

  get isEmpty() {
    return this.messages.root.children.length === 0;
  }

  /** Return the messages of the shown branch, first to last. */
  get path() {
    const path = [];
    for (let at = this.messages.root; at.chosen; ) {
      at = this.messages[at.chosen];
      path.push(at);
    }
    return path;
  }

  /** Add a message after another (null: at the start), and show it. */
  add(parent, message) {
    const id = newId();
    const above = this.messages[parent?.id ?? "root"];
    this.messages[id] = { children: [], chosen: null, ...message, id, parent: above.id };
    above.children.push(id);
    above.chosen = id;
    const isFirst = message.role === "user" && above.id === "root";
    if (isFirst && !this.isNamed) this.title = message.content.trim().slice(0, MAX_TITLE) || message.images?.[0]?.name || "…";
    return this.messages[id];
  }

  rename(title) {
    this.title = title.slice(0, MAX_TITLE);
    this.isNamed = true;
  }

  parentOf(message) {
    return message.parent === "root" ? null : this.messages[message.parent];
  }

  /** Return a message's index among its siblings, from 0, and their number. */
  place(message) {
    const { children } = this.messages[message.parent];
    return [children.indexOf(message.id), children.length];
  }

  /** Show the sibling at an offset from this message. */
  turn(message, by) {
    const above = this.messages[message.parent];
    above.chosen = above.children[above.children.indexOf(message.id) + by];
  }

  /**
   * Return the messages to send for an answer to `last`: all messages up to it. `imagePart(image)` resolves to the content part
   * of an image.
   */
  async upTo(last, imagePart) {
    const path = [];
    for (let at = last; at; at = this.parentOf(at)) path.unshift(at);
    const numBytes = path.flatMap(({ images }) => images ?? []).reduce((sum, { size }) => sum + size, 0);
    if (numBytes > MAX_IMAGE_BYTES) throw new Error(`the images up to here have more than ${MAX_IMAGE_BYTES >> 20} MiB`);
    const sent = [];
    for (const message of path) sent.push(await toApi(message, imagePart));
    return sent;
  }
}

async function toApi(message, imagePart) {
  const { role, content } = message;
  if (message.images?.length) {
    const parts = [];
    for (const image of message.images) parts.push(await imagePart(image));
    return { role, content: content.trim() ? [...parts, { type: "text", text: content }] : parts };
  }
  if (role === "tool") return { role, content, tool_call_id: message.callId };
  if (!message.calls?.length) return { role, content };
  const calls = message.calls.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } }));
  return { role, content: content || null, tool_calls: calls };
}
