// Sets up the page: the chat on the left, the engine's activity on the right, and one event stream for both.

import { byId, count } from "./dom.js";
import { Chat } from "./chat/chat.js";
import { Settings } from "./chat/settings.js";
import { Blocks } from "./live/blocks.js";
import { setUpClients } from "./live/clients.js";
import { colour } from "./live/colours.js";
import { Demos } from "./live/demos.js";
import { History } from "./live/history.js";
import { showMemory, showStates } from "./live/memory.js";
import { Pool } from "./live/pool.js";
import { LiveStream } from "./live/stream.js";
import { Tape } from "./live/tape.js";
import { Models } from "./models.js";

const pool = new Pool();
const tape = new Tape(byId("tape"), byId("tape-now"), pool);
const blocks = new Blocks(byId("blocks"), byId("blocks-now"), byId("blocks-text"), pool);
const history = new History(byId("charts"));
let facts = null; // latest snapshot, with the stats of the latest frame

const settings = new Settings();
const chat = new Chat(settings, {
  request: (serverId) => (serverId === null ? null : pool.find(`${serverId}-0`)),
  colour: (request) => colour(request.key),
  model: () => models.picked ?? facts?.models[0],
  imageRefusal: () => facts?.model.image_refusal ?? null, // while the model is not known, the server decides
});
const demos = new Demos(() => facts);
setUpClients(() => models.picked ?? facts?.models[0] ?? "MODEL");

/** Show the state of the connection, or of the engine. */
function connection(state, text) {
  const pill = byId("connection");
  if (pill.textContent === text) return; // screen readers announce every change
  pill.dataset.state = state;
  pill.textContent = text;
}

/** While the engine restarts, no step runs, and requests wait. */
const showEngine = ({ restarting }) => connection(restarting ? "paused" : "live", restarting ? "restarting" : "live");

/** Clear the live view, because the watched model is not loaded. */
function forget() {
  facts = null;
  settings.follow(null);
  byId("model").textContent = models.picked;
  document.title = `${models.picked} · metal-engine`;
  byId("memory").hidden = true;
  byId("states").hidden = true;
  byId("drafts-text").textContent = "";
  pool.begin();
  tape.begin();
  history.begin(null);
  blocks.begin();
  demos.refresh();
}

const models = new Models(() => {
  stream.begin();
  if (!models.isLoaded) forget();
});
models.run();
const stream = new LiveStream({
  async ready(say, isFirst) {
    // A restarted server may have other models.
    await (isFirst ? models.known : models.ask());
    while (!models.isLoaded) {
      say("not loaded");
      forget();
      await models.loaded();
    }
  },
  snapshot(snapshot) {
    facts = snapshot;
    const { models, model, limits } = snapshot;
    byId("model").textContent = `${models[0]} · ${model.type}, ${model.dtype}, ${count(limits.max_model_len)} tokens of context`;
    document.title = `${models[0]} · metal-engine ${snapshot.version}`;
    settings.follow(model.sampling);
    showEngine(snapshot.stats);
    showMemory(snapshot);
    pool.begin(snapshot);
    tape.begin(snapshot);
    history.begin(snapshot.stats);
    blocks.begin();
    demos.refresh();
  },
  frame(frame) {
    const lost = pool.apply(frame);
    for (const [key, proposed, accepted] of frame.drafts ?? []) chat.drafted(pool.requests.get(key), proposed, accepted);
    tape.add(frame.rows ?? []);
    blocks.update(lost);
    if (frame.stats) {
      facts.stats = frame.stats;
      showEngine(frame.stats);
      history.add(frame.stats);
      showStates(facts.pool.num_state_slots, frame.stats);
      const [proposed, accepted] = frame.stats.drafts;
      byId("drafts-text").textContent = proposed ? `${count(accepted)} of ${count(proposed)} drafts accepted so far.` : "";
    }
    chat.follow();
  },
  connection,
});
stream.run();

for (const tab of ["chat", "live"]) {
  byId(`tab-${tab}`).addEventListener("click", () => {
    document.body.dataset.tab = tab;
    for (const other of ["chat", "live"]) byId(`tab-${other}`).setAttribute("aria-pressed", String(other === tab));
  });
}
export { chat, demos, history, pool, tape };
