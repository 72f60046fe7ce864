// State of the block pool and its requests, from the events of /watch. docs/api.md describes their fields.

const NOTHING = { pool: { num_blocks: 0, block_size: 1, num_state_slots: 0 }, requests: [] };

/** State of the engine's block pool. Owners are keys of requests. Does not draw. */
export class Pool {
  constructor() {
    this.begin();
  }

  /** Reset the state, for a new snapshot or because no model is loaded. */
  begin(snapshot = NOTHING) {
    const { num_blocks: numBlocks, block_size: blockSize } = snapshot.pool;
    this.numBlocks = numBlocks;
    this.blockSize = blockSize;
    this.requests = new Map();
    this.tables = new Map();
    this.owners = new Array(numBlocks); // for each block, the requests whose tables contain it; undefined for none
    this.cached = new Uint8Array(numBlocks);
    this.lastOwner = new Int32Array(numBlocks).fill(-1);
    this.numUsed = 0;
    this.numCached = 0; // number of cached blocks in no table
    this.finished = []; // kept until the next frame, whose rows refer to them
    this.addRequests(snapshot.requests);
  }

  /** Update the state with a frame. Return the blocks that preempted requests have lost. */
  apply(frame) {
    for (const key of this.finished) this.requests.delete(key);
    this.finished = frame.finished ?? [];
    this.addRequests(frame.requests ?? []);
    const preempted = new Set(frame.preempted ?? []);
    const lost = [];
    for (const [key, cleared, runs] of frame.tables ?? []) {
      if (cleared) {
        const given = this.giveUp(key);
        if (preempted.has(key)) lost.push(...given);
      }
      this.add(key, runs);
    }
    this.setCached(frame.cached ?? [], 1);
    this.setCached(frame.uncached ?? [], 0);
    for (const row of frame.rows ?? []) this.follow(row);
    for (const key of preempted) if (this.requests.has(key)) this.requests.get(key).computed = 0;
    return lost;
  }

  addRequests(requests) {
    for (const one of requests) this.requests.set(one.key, { ...one, computed: one.cached_tokens });
  }

  /** Update the progress of requests after finished steps. */
  follow(row) {
    for (const [key, tokens, context, , drafts = 0] of row.segments) {
      const request = this.requests.get(key);
      if (request) request.computed = Math.max(request.computed, context + tokens - drafts + row.steps - 1);
    }
  }

  /** Return the request of an answer. The server sends only the last characters of ids. */
  find(id) {
    for (const request of this.requests.values()) if (id.endsWith(request.id)) return request;
    return null;
  }

  giveUp(key) {
    const table = this.tables.get(key) ?? [];
    this.tables.delete(key);
    for (const block of table) {
      const owners = this.owners[block].filter((owner) => owner !== key);
      this.owners[block] = owners.length ? owners : undefined;
      if (owners.length) continue;
      this.numUsed -= 1;
      this.numCached += this.cached[block];
    }
    return table;
  }

  add(key, runs) {
    if (!runs.length) return;
    const table = this.tables.get(key) ?? [];
    this.tables.set(key, table);
    for (const [first, length] of runs) {
      for (let block = first; block < first + length; block += 1) {
        table.push(block);
        this.lastOwner[block] = key;
        if (this.owners[block]) {
          this.owners[block] = [...this.owners[block], key];
          continue;
        }
        this.owners[block] = [key];
        this.numUsed += 1;
        this.numCached -= this.cached[block];
      }
    }
  }

  setCached(runs, value) {
    for (const [first, length] of runs) {
      for (let block = first; block < first + length; block += 1) {
        if (!this.owners[block]) this.numCached += value - this.cached[block];
        this.cached[block] = value;
      }
    }
  }
}
