// Streams as threads, events, the host's waits, and faults, which show late.
#pragma once
#include <ATen/core/TensorBody.h>
#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <random>
#include <thread>

#include "clocks.h"

constexpr auto CUDA = c10::DeviceType::CUDA;

struct Knobs { int devices = 1; size_t bytes = size_t(8) << 30; int delay_us = 0; bool one_device = true; };
inline Knobs knobs;
inline thread_local int current = 0;  // device, of this thread
inline thread_local std::map<int, int64_t> current_stream;  // by device
inline std::function<void(const char* kind, const std::string& what)> heard = [](auto...) {};  // what tests count
inline int report = -1;  // a file for races, as not every process comes to tell

inline void tell(const char* race) {
  dprintf(2, "softgpu: race: %s\n", race);
  if (report >= 0) dprintf(report, "%s\n", race);
}

// --- faults: the first is told at the next thing that the host asks for, and from then on ---
inline std::mutex fault_lock;
inline std::string fault;

inline void fail(const std::string& why) {
  std::lock_guard held(fault_lock);
  if (fault.empty()) fault = why;
}
inline void raise_fault() {
  std::lock_guard held(fault_lock);
  if (!fault.empty()) throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 710, "CUDA error: " + fault);
}
inline void tell_races() {  // with clocks.lock not held
  std::vector<std::string> found;
  { std::lock_guard held(clocks.lock); found.swap(clocks.races); }
  for (auto& race : found) { tell(race.c_str()); fail("race: " + race); }
}
inline void use_device(int device) {
  static std::atomic<int> first{-1};
  int none = -1;
  if (!first.compare_exchange_strong(none, device) && none != device && knobs.one_device) {
    std::string what = "this process of GPU " + std::to_string(none) + " uses GPU " + std::to_string(device);
    tell(what.c_str());
    fail(what);
  }
}

// --- streams ---
struct Mark {  // a point in a stream: reached or not, when, and what is over where it is
  Clock clock;
  std::chrono::steady_clock::time_point at;
  void reach() {
    { std::lock_guard held(lock_); reached_ = true; at = std::chrono::steady_clock::now(); }
    changed_.notify_all();
  }
  bool reached() { std::lock_guard held(lock_); return reached_; }
  void wait() { std::unique_lock held(lock_); changed_.wait(held, [&] { return reached_; }); }
 private:
  std::mutex lock_;
  std::condition_variable changed_;
  bool reached_ = false;
};
using MarkPtr = std::shared_ptr<Mark>;

class Queue {  // a stream
 public:
  const int lane;
  explicit Queue(int lane) : lane(lane) { std::thread([this] { work(); }).detach(); }
  void put(std::function<void()> kernel) {
    { std::lock_guard held(lock_); waiting_.push_back(std::move(kernel)); }
    changed_.notify_one();
  }
  bool idle() { std::lock_guard held(lock_); return waiting_.empty() && !busy_; }
 private:
  void work() {
    std::minstd_rand random(lane);
    at::AutoDispatchBelowAutograd below;
    for (;;) {
      std::function<void()> kernel;
      {
        std::unique_lock held(lock_);
        busy_ = false;
        changed_.wait(held, [&] { return !waiting_.empty(); });
        kernel = std::move(waiting_.front());
        waiting_.pop_front();
        busy_ = true;
      }
      if (knobs.delay_us) std::this_thread::sleep_for(std::chrono::microseconds(random() % (2 * knobs.delay_us)));
      try { kernel(); } catch (const std::exception& error) { fail(std::string(error.what()).substr(0, 400)); }
    }
  }
  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
  bool busy_ = false;
};

inline std::mutex queues_lock;
inline auto& queues = *new std::map<std::pair<int, int64_t>, Queue*>;
inline int64_t streams_made = 0;

inline Queue& queue(int device, int64_t stream) {
  use_device(device);
  std::lock_guard held(queues_lock);
  auto& found = queues[{device, stream}];
  if (!found) {
    std::lock_guard also(clocks.lock);
    found = new Queue(clocks.lane(device, stream));
  }
  return *found;
}
inline Queue& here(int device) { raise_fault(); return queue(device, current_stream[device]); }

inline MarkPtr mark(Queue& stream) {  // an event
  auto found = std::make_shared<Mark>();
  { std::lock_guard held(clocks.lock); clocks.join(stream.lane, clocks.of(HOST)); found->clock = clocks.of(stream.lane); }
  stream.put([found] { found->reach(); });
  return found;
}
inline void let_wait(Queue& stream, MarkPtr event) {
  { std::lock_guard held(clocks.lock); clocks.join(stream.lane, event->clock); }
  stream.put([event] { event->wait(); });
}

// --- the host waits ---
inline void sleep_until(Mark& event) {  // which the clocks don't know: what only this stand-in has to wait for
  if (!PyGILState_Check()) return event.wait();
  pybind11::gil_scoped_release others;
  event.wait();
}
void host_knows(const Clock&);  // memory.h
inline void host_waits(const MarkPtr& event, const std::string& why) {
  heard("wait", why);
  sleep_until(*event);
  host_knows(event->clock);
  raise_fault();
}
inline void host_waits_for_device(int device, const std::string& why) {
  std::vector<Queue*> all;
  { std::lock_guard held(queues_lock); for (auto& [key, found] : queues) if (key.first == device) all.push_back(found); }
  for (auto* found : all) host_waits(mark(*found), why);
}
