// A conversation as a tree of messages. Editing a message, or repeating an answer, adds a branch and keeps the others.

let numMade = 0;
const newId = () => `${Date.now().toString(36)}-${(numMade += 1)}-${Math.random().toString(36).slice(2, 8)}`;

const MAX_TITLE = 60;

/**
 * Messages by id. A message is {id, parent, role, content, children, chosen}. An answer also has {model, reasoning, calls,
 * figures, state, problem}. `chosen` is the child that is shown. The root is a message without a role. An answer's state is
 * "running", "done", "stopped" (by the user) or "failed". `problem` is the reason for the last two states.
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
    if (isFirst && !this.isNamed) this.title = message.content.trim().slice(0, MAX_TITLE) || "…";
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

  /** Return the messages to send for an answer to `last`: all messages up to it. */
  upTo(last) {
    const sent = [];
    for (let at = last; at; at = this.parentOf(at)) sent.unshift(toApi(at));
    return sent;
  }
}

function toApi(message) {
  const { role, content } = message;
  if (role === "tool") return { role, content, tool_call_id: message.callId };
  if (!message.calls?.length) return { role, content };
  const calls = message.calls.map(({ id, name, text }) => ({ id, type: "function", function: { name, arguments: text } }));
  return { role, content: content || null, tool_calls: calls };
}
