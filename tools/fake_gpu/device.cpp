// Fake GPU that computes nothing, inside the CPU-only libmlx. MLX's own evaluation, arrays, donation and throttle run
// unchanged. This file replaces the calls to Metal, with Metal's rules for the memory that a command buffer holds and for
// its commit. A kernel only takes time, on the device's own timeline. README.md describes the model.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>

#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/event.h"
#include "mlx/primitives.h"
#include "mlx/scheduler.h"

using namespace mlx::core;
using Clock = std::chrono::steady_clock;
using Held = std::unordered_set<std::shared_ptr<array::Data>>;

namespace {

// Contents of MLX's CPU events in 0.32.4 (mlx/backend/no_gpu/event.cpp). No header declares it.
struct EventCounter {
  uint64_t value{0};
  std::mutex mutex;
  std::condition_variable changed;
  std::atomic<Error*> error;
};

// Same fields as `FakeGpuSettings` of device.py.
struct Settings {
  double encode_us;
  double view_us;
  double kernel_us;
  double us_per_mb;
  long max_ops;
  long max_mb;
  long pool_array_bytes;
  long is_late;
} settings{0, 0, 0, 0, 40, 40, 1L << 62, 0};

// Same fields as `Counts` of device.py.
struct Counts {
  long kernels;
  long views;
  long copies;
  long pool_copies;
  long commits;
  long encode_ns;
  long busy_ns;
  long idle_ns;
  long finished;
} counts;

// Command buffer that is being encoded. One thread encodes for one stream.
struct CommandBuffer {
  Held held;
  std::unordered_set<const void*> counted;
  long ops = 0;
  size_t elements = 0;
  double gpu_us = 0;
} encoding;

// State of the device's timeline, and a gate for tests: while it is closed, no command buffer completes.
std::mutex mutex;
// Never destroyed: at the exit of the process, the destructor would wait for threads that still wait for the device.
std::condition_variable& gate = *new std::condition_variable;
bool is_open = true;
Clock::time_point idle_since;
bool has_worked = false;
// Events that threads wait for, with their values, and the number of calls of `fake_synchronize` that wait.
std::multimap<const void*, uint64_t> awaited;
long synchronizing = 0;
// Counted command buffers that hold memory, and their limit, which is that of mlx/transforms.cpp.
long active = 0;
constexpr long MAX_ACTIVE_TASKS = 10;
std::condition_variable& completed = *new std::condition_variable;

const std::unordered_set<std::string> VIEWS = {
    "AsStrided", "Broadcast", "BroadcastAxes", "Copy", "CustomTransforms", "Depends", "ExpandDims", "Flatten",
    "NumberOfElements", "Reshape", "Slice", "Split", "Squeeze", "StopGradient", "Transpose", "Unflatten", "View"};
const std::unordered_set<std::string> IN_PLACE = {
    "DynamicSliceUpdate", "MaskedScatter", "Scatter", "ScatterAxis", "SliceUpdate"};
// Operations that read at most as many bytes of an input as they write.
const std::unordered_set<std::string> PICKING = {"CustomKernel", "Gather", "GatherAxis"};
// MLX may read arrays up to this size on the host, mainly tokens. They are zeroed. Larger arrays are never written.
constexpr size_t ZEROED_BYTES = 16384;

void spend(double us) {
  if (us <= 0) return;
  const auto end = Clock::now() + std::chrono::nanoseconds(long(us * 1000));
  while (Clock::now() < end) {}
}

// True if the next command buffer may complete. A late device completes one only if a thread waits for the device.
bool may_complete() {
  if (!is_open) return false;
  return !settings.is_late || !awaited.empty() || synchronizing || active > MAX_ACTIVE_TASKS;
}

// Submit the encoded command buffer to the device.
void commit(Stream stream, bool is_counted) {
  if (is_counted) {
    scheduler::notify_new_task(stream);
    std::lock_guard lock(mutex);
    active += 1;
  }
  const auto time = std::chrono::nanoseconds(long(encoding.gpu_us * 1000));
  const auto committed = Clock::now();
  counts.commits += encoding.ops > 0;
  auto held = std::make_shared<Held>(std::move(encoding.held));
  encoding = CommandBuffer();
  scheduler::enqueue(stream, [=]() {
    {
      std::unique_lock lock(mutex);
      gate.wait(lock, may_complete);
      if (time.count()) {
        if (!has_worked) idle_since = committed;
        has_worked = true;
        if (committed > idle_since) {
          counts.idle_ns += (committed - idle_since).count();
          idle_since = committed;
        }
        counts.busy_ns += time.count();
        idle_since += time;
      }
      counts.finished += 1;
    }
    if (time.count()) std::this_thread::sleep_until(idle_since);
    if (is_counted) scheduler::notify_task_completion(stream);
    // As on Metal, a completion handler is destroyed after it has run, which releases the memory it holds.
    held->clear();
    if (is_counted) {
      std::lock_guard lock(mutex);
      active -= 1;
      completed.notify_all();
    }
  });
  std::unique_lock lock(mutex);
  gate.notify_all();
  // Here instead of in MLX's throttle, which could begin after the completion that it waits for.
  if (settings.is_late) completed.wait(lock, [] { return active <= MAX_ACTIVE_TASKS; });
}

void allocate(array& out) {
  out.set_data(allocator::malloc(out.nbytes()));
  if (out.nbytes() < ZEROED_BYTES) std::memset(out.data<char>(), 0, out.nbytes());
  counts.pool_copies += long(out.nbytes()) >= settings.pool_array_bytes;
}

void count_elements(const array& a) {
  if (encoding.counted.insert(a.data_shared_ptr().get()).second) encoding.elements += a.data_size();
}

double kernel_us(const std::string& name, const std::vector<array>& inputs, const std::vector<array>& outputs) {
  size_t bytes = 0, put_out = 0;
  for (const auto& out : outputs) put_out += out.nbytes();
  const bool is_in_place = IN_PLACE.count(name), is_picking = PICKING.count(name);
  if (!is_in_place) bytes += put_out;
  for (size_t i = is_in_place; i < inputs.size(); i++) {
    const size_t size = inputs[i].nbytes();
    bytes += (is_in_place ? 2 : 1) * (is_picking ? std::min(size, put_out) : size);
  }
  return settings.kernel_us + settings.us_per_mb * double(bytes) / (1 << 20);
}

// Encode a kernel and allocate its outputs.
void encode_kernel(const std::string& name, array& arr, std::vector<array>& outputs) {
  if (IN_PLACE.count(name)) {
    const array& target = arr.inputs()[0];
    if (target.is_donatable()) {
      outputs[0].copy_shared_buffer(target);
    } else {
      counts.copies += 1;
      allocate(outputs[0]);
    }
  } else {
    for (auto& out : outputs) allocate(out);
  }
  counts.kernels += 1;
  encoding.ops += 1;
  encoding.gpu_us += kernel_us(name, arr.inputs(), outputs);
  for (const auto& in : arr.inputs()) count_elements(in);
  for (const auto& out : outputs) count_elements(out);
  spend(settings.encode_us);
}

// Execute an operation that moves no data. Returns false for other operations.
bool is_view(const std::string& name, array& arr, std::vector<array>& outputs) {
  if (name == "Contiguous" && arr.inputs()[0].flags().row_contiguous) {
    outputs[0].copy_shared_buffer(arr.inputs()[0]);
  } else if (VIEWS.count(name)) {
    try {
      arr.primitive().eval_cpu(arr.inputs(), outputs);
    } catch (const std::exception&) {
      return false;  // a reshape that moves data is a kernel on a GPU's stream
    }
  } else {
    return false;
  }
  counts.views += 1;
  spend(settings.view_us);
  return true;
}

}  // namespace

extern "C" {

// --- MLX's GPU functions; each replaces the function named in device.py ---

bool fake_true() { return true; }
bool fake_false() { return false; }
int fake_one() { return 1; }
void fake_nothing() {}

void fake_eval(array* evaluated) {
  const auto started = Clock::now();
  array& arr = *evaluated;
  const auto stream = arr.primitive().stream();
  auto outputs = arr.outputs();
  const std::string name = arr.primitive().name();
  // MLX ends each evaluation with an operation that does nothing.
  if (name != "Synchronize" && !is_view(name, arr, outputs)) encode_kernel(name, arr, outputs);
  // metal/eval.cpp: the command buffer holds all inputs until it is done, except an input donated to the output.
  for (const auto& in : arr.inputs()) encoding.held.insert(in.data_shared_ptr());
  for (const auto& sibling : arr.siblings()) encoding.held.insert(sibling.data_shared_ptr());
  encoding.held.erase(arr.data_shared_ptr());
  // metal/device.cpp, needs_commit: the limit named megabytes counts elements.
  if (encoding.ops > settings.max_ops || long(encoding.elements >> 20) > settings.max_mb) commit(stream, true);
  counts.encode_ns += (Clock::now() - started).count();
}

void fake_finalize(Stream stream) { commit(stream, false); }

void fake_synchronize(Stream stream) {
  commit(stream, false);
  auto done = std::make_shared<std::promise<void>>();
  auto end = done->get_future();
  {
    std::lock_guard lock(mutex);
    synchronizing += 1;
    gate.notify_all();
  }
  scheduler::enqueue(stream, [done]() {
    {
      std::lock_guard lock(mutex);
      synchronizing -= 1;
    }
    done->set_value();
  });
  end.wait();
}

void fake_signal(Event* event, Stream stream) {
  if (stream.device == Device::gpu) commit(stream, false);
  scheduler::signal_event(stream, *event, [value = event->value()](Event& e) {
    auto& counter = e.cast<EventCounter>();
    {
      std::lock_guard lock(counter.mutex);
      counter.value = value;
    }
    {
      // Not in the thread that waits: before it runs again, the next command buffers would complete.
      std::lock_guard lock(mutex);
      const auto [first, last] = awaited.equal_range(&counter);
      for (auto it = first; it != last;) it = it->second <= value ? awaited.erase(it) : std::next(it);
    }
    counter.changed.notify_all();
  });
}

void fake_wait(Event* event) {
  auto& counter = event->cast<EventCounter>();
  const auto check_error = [&] {
    if (auto* error = counter.error.load()) error->check();
  };
  check_error();
  const auto value = event->value();
  {
    std::unique_lock lock(counter.mutex);
    if (counter.value < value) {
      {
        std::lock_guard device_lock(mutex);
        awaited.emplace(&counter, value);
        gate.notify_all();
      }
      counter.changed.wait(lock, [&] { return counter.value >= value; });
    }
  }
  check_error();
}

// --- interface of device.py ---

void fake_configure(const Settings* given) { settings = *given; }

void fake_counts(Counts* out, bool reset) {
  std::lock_guard lock(mutex);
  *out = counts;
  if (!reset) return;
  counts = Counts();
  has_worked = has_worked && idle_since > Clock::now();  // idle time before the reset does not count
}

void fake_gate(bool open) {
  std::lock_guard lock(mutex);
  is_open = open;
  gate.notify_all();
}

bool fake_replace(void* function, const char* with) {
  static const std::unordered_map<std::string, void*> ours = {
      {"true", (void*)fake_true}, {"false", (void*)fake_false}, {"one", (void*)fake_one},
      {"nothing", (void*)fake_nothing}, {"eval", (void*)fake_eval}, {"finalize", (void*)fake_finalize},
      {"synchronize", (void*)fake_synchronize}, {"signal", (void*)fake_signal}, {"wait", (void*)fake_wait}};
  const size_t page = sysconf(_SC_PAGESIZE);
  char* start = (char*)((size_t)function & ~(page - 1));
  if (mprotect(start, 2 * page, PROT_READ | PROT_WRITE | PROT_EXEC)) return false;
  // movabs rax, address; jmp rax
  unsigned char jump[12] = {0x48, 0xb8};
  void* target = ours.at(with);
  std::memcpy(jump + 2, &target, 8);
  jump[10] = 0xff;
  jump[11] = 0xe0;
  std::memcpy(function, jump, sizeof(jump));
  return !mprotect(start, 2 * page, PROT_READ | PROT_EXEC);
}
}
