// Commands with which other programs use this server.

import { hasKey } from "../api.js";
import { byId, copyButton, el } from "../dom.js";

/** Quote a text as one word for a shell. */
const quote = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

function lines(model) {
  const origin = quote(location.origin);
  const [key, header, before] = hasKey()
    ? ["YOUR_KEY", " -H 'Authorization: Bearer YOUR_KEY'", "METAL_ENGINE_API_KEY=YOUR_KEY "]
    : ["none", "", ""];
  const launch = (tool) => `${before}metal-engine launch ${tool} --exec --url ${origin}`;
  const body = JSON.stringify({ model, messages: [{ role: "user", content: "Hello" }] });
  return [
    ["curl", `curl ${quote(`${location.origin}/v1/chat/completions`)}${header} -H 'Content-Type: application/json' -d ${quote(body)}`],
    [
      "Python, with openai",
      `from openai import OpenAI\n\nclient = OpenAI(base_url=${JSON.stringify(`${location.origin}/v1`)}, api_key="${key}")\n` +
        `answer = client.chat.completions.create(\n    model=${JSON.stringify(model)}, messages=[{"role": "user", "content": "Hello"}]\n)\n` +
        "print(answer.choices[0].message.content)",
    ],
    ["Claude Code", launch("claude")],
    ["Codex", launch("codex")],
    ["opencode", launch("opencode")],
    ["aider", launch("aider")],
    ["Any tool with OpenAI's API", `OPENAI_BASE_URL=${quote(`${location.origin}/v1`)}\nOPENAI_API_KEY=${key}\nOPENAI_MODEL=${quote(model)}`],
    ["Any tool with Anthropic's API", `ANTHROPIC_BASE_URL=${origin}\nANTHROPIC_AUTH_TOKEN=${key}\nANTHROPIC_MODEL=${quote(model)}`],
    ["Any tool with Ollama's API", `OLLAMA_HOST=${origin}`],
  ];
}

export function setUpClients(model) {
  const dialog = byId("connect-dialog");
  byId("connect-open").addEventListener("click", () => {
    const shown = lines(model()).map(([name, text]) =>
      el(
        "div",
        { className: "client" },
        el("h3", { textContent: name }),
        copyButton(() => text, `the lines for ${name}`),
        el("pre", { tabIndex: 0 }, el("code", { textContent: text })),
      ),
    );
    byId("connect-list").replaceChildren(...shown);
    dialog.showModal();
  });
  byId("connect-close").addEventListener("click", () => dialog.close());
}
