// Merges the splits of each row, and copies rows that are not split: the body of a kernel, one thread per output
// element.
//
// metal_sim: never small: whole, partial_out, partial_lse, rows
//
// rows: for each (packed token, query head of the group): first partial row, number of splits, partial rows from one
// split to the next. A row with 0 splits is copied from `whole`. A threadgroup has one token and one head. Its threads
// read the log-sum-exp of each split once, and share it in threadgroup memory.
//
// Template: T, D, G, HAS_SINKS, MAX_SPLITS.

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LOWEST = -1e30f;  // as in paged_attention.metal

threadgroup float logs[MAX_SPLITS];

const int column = int(thread_position_in_grid.x);
const int head = int(thread_position_in_grid.y);
const int token = int(thread_position_in_grid.z);
const int num_heads = int(threads_per_grid.y);
const int num_kv_heads = num_heads / G;
const int row = (token * G + head % G) * 3;
const int splits = rows[row + 1];
const ulong at = (ulong(token) * num_heads + head) * D + column;

if (splits == 0) {
  out[at] = whole[at];
} else {
  const int first = rows[row];
  const int stride = rows[row + 2];
  const int kv_head = head / G;
  const float sink = HAS_SINKS ? float(sinks[head]) * LOG2E : LOWEST;
  for (int s = int(thread_position_in_threadgroup.x); s < splits; s += int(threads_per_threadgroup.x)) {
    logs[s] = partial_lse[(first + s * stride) * num_kv_heads + kv_head];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float peak = sink;
  for (int s = 0; s < splits; ++s) {
    peak = max(peak, logs[s]);
  }
  float total = HAS_SINKS ? fast::exp2(sink - peak) : 0.0f;
  float sum = 0.0f;
  for (int s = 0; s < splits; ++s) {
    const int at_split = (first + s * stride) * num_kv_heads + kv_head;
    const float weight = fast::exp2(logs[s] - peak);
    total += weight;
    sum += weight * float(partial_out[ulong(at_split) * D + column]);
  }
  out[at] = T(sum / total);
}
