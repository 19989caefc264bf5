// What torch asks of a device type beside its kernels: the guard, and CUDA's hooks.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

inline int index_of(c10::Device device) { return device.index() < 0 ? current : device.index(); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;
  using Stream = c10::Stream;
  c10::DeviceType type() const override { return CUDA; }
  Device exchangeDevice(Device device) const override { Device old(CUDA, current); uncheckedSetDevice(device); return old; }
  Device getDevice() const override { return {CUDA, (c10::DeviceIndex)current}; }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < knobs.devices, "CUDA error: invalid device ordinal");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override { current = index_of(device); }
  c10::DeviceIndex deviceCount() const noexcept override { return knobs.devices; }

  static Stream of(int device, int64_t id) { return Stream(Stream::UNSAFE, Device(CUDA, device), id); }
  static Queue& at(const Stream& stream) { raise_fault(); return queue(stream.device_index(), stream.id()); }
  Stream getStream(Device device) const override { return of(index_of(device), current_stream[index_of(device)]); }
  Stream getDefaultStream(Device device) const override { return of(index_of(device), 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device device, int) const override {
    std::lock_guard held(queues_lock);
    return of(index_of(device), ++streams_made);
  }
  Stream exchangeStream(Stream stream) const override {
    return of(stream.device_index(), std::exchange(current_stream[stream.device_index()], stream.id()));
  }
  bool queryStream(const Stream& stream) const override { return at(stream).idle(); }
  void synchronizeStream(const Stream& stream) const override { host_waits(mark(at(stream)), "a stream"); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    host_waits_for_device(device < 0 ? current : device, "the device");
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const Stream& stream) const override {
    auto& lane = at(stream);
    std::lock_guard held(clocks.lock);
    if (auto* block = (Block*)memory.get_context(); block && block->home != lane.lane) block->recorded.insert(lane.lane);
  }

  static MarkPtr mark_of(void* event) { return event ? *(MarkPtr*)event : nullptr; }
  void record(void** event, const Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new MarkPtr;
    *(MarkPtr*)*event = mark(at(stream));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete (MarkPtr*)event; }
  void block(void* event, const Stream& stream) const override { if (event) let_wait(at(stream), mark_of(event)); }
  bool queryEvent(void* event) const override {
    raise_fault();
    if (event && !mark_of(event)->reached()) return false;
    if (event) host_knows(mark_of(event)->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override { if (event) host_waits(mark_of(event), "an event"); }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    for (auto* event : {from, to}) TORCH_CHECK(event && mark_of(event)->reached(), "CUDA error: device not ready");
    return std::chrono::duration<double, std::milli>(mark_of(to)->at - mark_of(from)->at).count();
  }
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

inline auto& generators = *new std::vector<at::Generator>;  // the CPU's, so that both draw the same

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  void init() const override {}
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  const Generator& getDefaultGenerator(DeviceIndex device) const override {
    while ((int)generators.size() < knobs.devices) generators.push_back(detail::createCPUGenerator(default_rng_seed_val));
    return generators[device < 0 ? current : device];
  }
  bool isPinnedPtr(const void* address) const override { std::lock_guard held(clocks.lock); return pinned_at(address); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  DeviceIndex current_device() const override { return current; }
  int getNumGPUs() const override { return knobs.devices; }
  DeviceIndex deviceCount() const override { return knobs.devices; }
  void setCurrentDevice(DeviceIndex device) const override { current = device; }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(current, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return std::exchange(current, device < 0 ? current : device);
  }
  void deviceSynchronize(DeviceIndex device) const override { host_waits_for_device(device, "the device"); }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at
