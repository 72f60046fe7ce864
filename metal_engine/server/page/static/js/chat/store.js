// Stores conversations and settings in this browser only.

import { Conversation } from "./conversation.js";
import { deleteImages } from "./images.js";

const PREFIX = "metal-engine.conversation.";
const CURRENT = "metal-engine.current";
const SETTINGS = "metal-engine.settings";
const MAX_CONVERSATIONS = 200;

function read(name) {
  try {
    return JSON.parse(localStorage.getItem(name));
  } catch {
    return null; // another program's data, or truncated
  }
}

export function loadSettings() {
  return read(SETTINGS) ?? {};
}

export function saveSettings(settings) {
  localStorage.setItem(SETTINGS, JSON.stringify(settings));
}

/** Return all conversations as {id, title, time}, the latest first. */
export function listConversations() {
  const found = [];
  for (let i = 0; i < localStorage.length; i += 1) {
    const name = localStorage.key(i);
    const saved = name.startsWith(PREFIX) ? read(name) : null;
    if (saved) found.push({ id: saved.id, title: saved.title, time: saved.time });
  }
  return found.sort((a, b) => b.time - a.time);
}

const AROUND = 40; // number of characters on each side of a match

/** Return the conversations with a text in their title or a message, as {id, title, excerpt}, the latest first. */
export function searchConversations(text) {
  const wanted = text.toLowerCase();
  const found = [];
  for (const { id, title } of listConversations()) {
    const contents = Object.values(read(PREFIX + id).messages).map((message) => message.content ?? "");
    const match = wanted ? contents.find((content) => content.toLowerCase().includes(wanted)) : undefined;
    if (match === undefined && !title.toLowerCase().includes(wanted)) continue;
    found.push({ id, title, excerpt: match === undefined ? "" : excerpt(match, match.toLowerCase().indexOf(wanted)) });
  }
  return found;
}

function excerpt(text, at) {
  const [start, end] = [Math.max(at - AROUND, 0), at + 2 * AROUND];
  return `${start ? "…" : ""}${text.slice(start, end)}${end < text.length ? "…" : ""}`;
}

/** Return the conversation that was open, or a new one. Answers that were in progress when the page closed stay incomplete. */
export function openConversation(id = localStorage.getItem(CURRENT)) {
  const conversation = new Conversation(id ? read(PREFIX + id) : null);
  for (const message of Object.values(conversation.messages)) {
    if (message.state === "running") Object.assign(message, { state: "stopped", problem: "the page was closed" });
  }
  localStorage.setItem(CURRENT, conversation.id);
  return conversation;
}

/** Save a conversation, deleting the oldest ones if there is no space. Return true if it was saved. */
export function saveConversation(conversation) {
  if (conversation.isEmpty || conversation.isDeleted) return true;
  localStorage.setItem(CURRENT, conversation.id);
  const { id, title, isNamed, messages } = conversation;
  const text = JSON.stringify({ id, title, isNamed, messages, time: Date.now() });
  const others = listConversations().filter((one) => one.id !== id);
  for (const one of others.splice(MAX_CONVERSATIONS - 1)) deleteConversation(one.id);
  while (true) {
    try {
      localStorage.setItem(PREFIX + id, text);
      return true;
    } catch {
      if (!others.length) return false;
      deleteConversation(others.pop().id);
    }
  }
}

export function deleteConversation(id) {
  localStorage.removeItem(PREFIX + id);
  deleteImages(id);
}
