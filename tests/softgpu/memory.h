// Memory: of the device, cached stream by stream as torch's allocator does, with a limit and NaN in what is new; and
// pinned memory of the host, which the host cannot touch while the device may still do. Both at two addresses: what the
// host has of the device can't be read, and kernels use the other one.
#pragma once
#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Allocator.h>
#include <signal.h>
#include <sys/mman.h>

#include "streams.h"

// --- of the device ---
constexpr size_t SPACE = size_t(1) << 38;  // addresses of a device

struct Block : Traced { char* at; size_t size; int device; int64_t stream; };
struct Memory {
  char *base = nullptr, *real = nullptr;
  size_t next = 0, allocated = 0, peak = 0, reserved = 0, peak_reserved = 0, segments = 0;
  std::map<int64_t, std::multimap<size_t, Block*>> free;  // by stream
  std::vector<std::pair<Block*, std::vector<MarkPtr>>> later;  // free when other streams have come so far
};
inline std::mutex memory_lock;
inline auto& memories = *new std::map<int, Memory>;

inline Memory& memory_of(int device) {
  auto& found = memories[device];
  if (!found.base) {
    auto map = [](int access) {
      return (char*)mmap(nullptr, SPACE, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    };
    found.base = map(PROT_NONE);
    found.real = map(PROT_READ | PROT_WRITE);
  }
  return found;
}
inline char* real_address(const void* address, int device) {
  std::lock_guard held(memory_lock);
  auto& memory = memory_of(device);
  return address ? memory.real + ((char*)address - memory.base) : nullptr;
}

inline void give_back(void* context) {  // torch aborts a process that frees memory of a GPU that has failed
  {
    std::lock_guard held(fault_lock);
    if (!fault.empty() && fault.rfind("race", 0)) { dprintf(2, "softgpu: freed after %s\n", fault.c_str()); abort(); }
  }
  auto* block = (Block*)context;
  auto recorded = block->recorded;
  { std::lock_guard held(clocks.lock); clocks.give_back(*block); }
  tell_races();
  std::vector<MarkPtr> marks;
  {
    std::lock_guard held(queues_lock);
    for (auto& [key, stream] : queues) if (recorded.count(stream->lane)) marks.push_back(mark(*stream));
  }
  std::lock_guard held(memory_lock);
  auto& memory = memory_of(block->device);
  memory.allocated -= block->size;
  if (marks.empty()) memory.free[block->stream].emplace(block->size, block);
  else memory.later.emplace_back(block, marks);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    int device = current;
    if (!bytes) return {nullptr, nullptr, &give_back, c10::Device(CUDA, device)};
    auto& stream = here(device);
    size_t size = (bytes + 511) / 512 * 512;
    Block* block = cached(device, size);
    if (!block) {  // as torch: give back what is cached, and try again
      host_waits_for_device(device, "the allocator");
      block = cached(device, size, true);
    }
    TORCH_CHECK_WITH(OutOfMemoryError, block, "CUDA out of memory. Tried to allocate ", bytes, " bytes; GPU ", device,
                     " has ", knobs.bytes, " bytes, of which ", memory_of(device).allocated, " are allocated");
    block->home = stream.lane;
    auto* real = real_address(block->at, device);
    { std::lock_guard held(clocks.lock); clocks.issue(stream.lane, "the allocation", {{block, true, 0, size}}); }
    stream.put([real, size] { memset(real, 0xFF, size); });  // NaN
    return {block->at, block, &give_back, c10::Device(CUDA, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "not on this device"); }

 private:
  static Block* cached(int device, size_t size, bool clear = false) {
    int64_t stream = current_stream[device];
    Block* found = nullptr;
    bool fresh = false;
    {
      std::lock_guard held(memory_lock);
      auto& memory = memory_of(device);
      std::erase_if(memory.later, [&](auto& x) {
        bool over = std::all_of(x.second.begin(), x.second.end(), [](auto& mark) { return mark->reached(); });
        if (over) memory.free[x.first->stream].emplace(x.first->size, x.first);
        return over;
      });
      for (auto& [_, list] : memory.free) {
        for (auto& [size, block] : list) {
          if (!clear) break;
          madvise(memory.real + (block->at - memory.base), size, MADV_DONTNEED);
          memory.reserved -= size;
          delete block;
        }
        if (clear) list.clear();
      }
      auto& free = memory.free[stream];
      if (auto it = free.lower_bound(size); it != free.end() && it->first <= size + size / 8) {
        found = it->second;
        free.erase(it);
      } else if (memory.reserved + size <= knobs.bytes) {
        found = new Block{{}, memory.base + memory.next, size, device, stream};
        memory.next += size;
        memory.reserved += size;
        memory.peak_reserved = std::max(memory.peak_reserved, memory.reserved);
        fresh = true;
      }
      if (found) memory.peak = std::max(memory.peak, memory.allocated += found->size);
    }
    if (fresh) heard("segment", std::to_string(size));
    return found;
  }
};
inline DeviceAllocator& device_allocator = *new DeviceAllocator;

// --- pinned ---
struct Pinned : Traced {
  char *at, *real;
  size_t size;
  std::vector<Use> under_way;  // what the host doesn't know to be over
};
inline auto& pinned_blocks = *new std::map<const char*, Pinned*>;  // with clocks.lock

inline Pinned* pinned_at(const void* address) {  // with clocks.lock held
  auto found = pinned_blocks.upper_bound((const char*)address);
  if (found == pinned_blocks.begin()) return nullptr;
  auto* block = (--found)->second;
  return (char*)address < block->at + block->size ? block : nullptr;
}
inline void protect(Pinned& block) {
  bool written = false;
  for (auto& use : block.under_way) written |= use.writes;
  if (block.real != block.at)  // registered memory is at one address alone
    mprotect(block.at, block.size, block.under_way.empty() ? PROT_READ | PROT_WRITE : written ? PROT_NONE : PROT_READ);
}
inline void use_pinned(Pinned& block, Use use) { block.under_way.push_back(use); protect(block); }
inline void host_knows(const Clock& clock) {
  std::lock_guard held(clocks.lock);
  clocks.join(HOST, clock);
  for (auto& [_, block] : pinned_blocks)
    if (std::erase_if(block->under_way, [](auto& use) { return clocks.is_over(use.lane, use.count); })) protect(*block);
}
inline void unpin(void* address) {
  std::unique_lock held(clocks.lock);
  auto found = pinned_blocks.find((char*)address);
  if (found == pinned_blocks.end()) return;
  auto* block = found->second;
  pinned_blocks.erase(found);
  held.unlock();
  if (block->real != block->at) { munmap(block->at, block->size); munmap(block->real, block->size); }
  delete block;
}
inline void pin(void* at, void* real, size_t size) {
  std::lock_guard held(clocks.lock);
  pinned_blocks[(char*)at] = new Pinned{{}, (char*)at, (char*)real, size, {}};
}
struct PinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    size_t page = sysconf(_SC_PAGESIZE), size = (std::max<size_t>(bytes, 1) + page - 1) / page * page;
    int file = memfd_create("pinned", 0);
    TORCH_CHECK(file >= 0 && !ftruncate(file, size), "no pinned memory");
    auto map = [&] { return mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0); };
    void *at = map(), *real = map();
    close(file);
    pin(at, real, size);
    return {at, at, &unpin, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }  // kernels hold what they use
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
inline PinnedAllocator& pinned_allocator = *new PinnedAllocator;

// --- the host where it must not be ---
inline struct sigaction as_before;

inline void on_fault(int number, siginfo_t* info, void*) {
  const char* what = nullptr;
  for (auto& [_, memory] : memories)
    if (memory.base && info->si_addr >= memory.base && info->si_addr < memory.base + SPACE) what = "memory of a GPU";
  if (!what && clocks.lock.try_lock()) {
    if (pinned_at(info->si_addr)) what = "pinned memory that the device may still use";
    clocks.lock.unlock();
  }
  if (what) tell((std::string("the host touches ") + what).c_str());
  sigaction(number, &as_before, nullptr);  // the same again, for whoever else hears of it
}
inline void watch_host() {
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO;
  static bool watched = !sigaction(SIGSEGV, &action, &as_before);  // once; processes that are forked have it
  (void)watched;
}
