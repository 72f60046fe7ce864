// The conversations in this browser's storage: a list, a search, and actions on the open conversation.

import { byId, el } from "../dom.js";
import { download, toMarkdown } from "./export.js";
import { deleteConversation, listConversations, openConversation, saveConversation, searchConversations } from "./store.js";

export class Library {
  /** `chat.conversation` is the open conversation, and `chat.open(conversation)` opens another. */
  constructor(chat) {
    this.chat = chat;
    this.menu = byId("conversation-more");
    byId("conversations").addEventListener("change", (event) => chat.open(openConversation(event.target.value)));
    byId("conversation-new").addEventListener("click", () => {
      chat.open(openConversation(null));
      byId("prompt").focus();
    });
    this.choice("conversation-rename", () => this.rename());
    this.choice("conversation-export", () => {
      const { conversation } = chat;
      download(`${conversation.title}.md`, toMarkdown(conversation));
    });
    this.choice("conversation-delete", () => this.delete());
    this.menu.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      this.menu.open = false;
      this.menu.querySelector("summary").focus();
    });
    document.addEventListener("click", (event) => {
      if (!this.menu.contains(event.target)) this.menu.open = false;
    });
    this.setUpSearch();
  }

  choice(id, act) {
    byId(id).addEventListener("click", () => {
      this.menu.open = false;
      act();
    });
  }

  /** Update the list of conversations. */
  show() {
    const open = this.chat.conversation;
    const listed = listConversations();
    if (!listed.some((one) => one.id === open.id)) listed.unshift(open);
    const options = listed.map((one) => el("option", { value: one.id, textContent: one.title }));
    byId("conversations").replaceChildren(...options);
    byId("conversations").value = open.id;
    for (const id of ["conversation-rename", "conversation-export"]) byId(id).disabled = open.isEmpty;
  }

  rename() {
    const { conversation } = this.chat;
    const title = prompt("Name of this conversation", conversation.title)?.trim();
    if (!title) return;
    conversation.rename(title);
    saveConversation(conversation);
    this.show();
  }

  delete() {
    const { conversation } = this.chat;
    if (!conversation.isEmpty && !confirm("Delete this conversation?")) return;
    conversation.isDeleted = true; // an answer that ends later must not save it again
    deleteConversation(conversation.id);
    this.chat.open(openConversation(listConversations()[0]?.id ?? null));
  }

  setUpSearch() {
    const [dialog, field, found] = ["search-dialog", "search", "search-found"].map(byId);
    byId("search-open").addEventListener("click", () => {
      field.value = "";
      this.find("");
      dialog.showModal();
    });
    byId("search-close").addEventListener("click", () => dialog.close());
    field.addEventListener("input", () => this.find(field.value));
    byId("search-form").addEventListener("submit", (event) => {
      event.preventDefault();
      found.querySelector("button")?.click();
    });
  }

  /** Show the conversations that contain a text. */
  find(text) {
    const matches = searchConversations(text.trim());
    const items = matches.map(({ id, title, excerpt }) => {
      const button = el("button", { type: "button" }, el("span", { textContent: title }));
      if (excerpt) button.append(el("span", { className: "quiet small", textContent: excerpt }));
      button.addEventListener("click", () => {
        byId("search-dialog").close();
        this.chat.open(openConversation(id));
      });
      return el("li", {}, button);
    });
    byId("search-found").replaceChildren(...items);
    byId("search-count").textContent = matches.length === 1 ? "1 conversation" : `${matches.length} conversations`;
  }
}
