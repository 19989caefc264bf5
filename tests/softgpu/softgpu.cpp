// A CUDA device that isn't there, for a build of torch for CPUs, which has all of CUDA's dispatch but its kernels.
#include "nccl.h"

#include <fcntl.h>

namespace py = pybind11;

PYBIND11_MODULE(_softgpu, m) {
  // import torch has asked for CUDA's hooks before us: an object without data, which becomes one of ours
  static auto& hooks = *new at::CUDAHooks(at::CUDAHooksArgs{});
  *(void**)&at::detail::getCUDAHooks() = *(void**)&hooks;
  c10::SetAllocator(CUDA, &device_allocator, 1);
  at::setHostAllocator(CUDA, &pinned_allocator, 1);

  m.def("configure", [](int devices, size_t bytes, int delay_us, bool one_device, const std::string& file) {
    knobs = {devices, bytes, delay_us, one_device};
    if (!file.empty()) report = open(file.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    watch_host();
  });
  m.def("hear", [](py::function f) {
    auto& kept = *new py::function(f);
    heard = [&kept](const char* kind, const std::string& what) {
      if (!Py_IsInitialized()) return;
      py::gil_scoped_acquire held;
      kept(kind, what);
    };
  });
  m.def("kernels", [] { return kernels.load(); });
  m.def("devices", [] { return knobs.devices; });
  m.def("device", [] { return current; });
  m.def("set_device", [](int device) {  // which makes a context there, as CUDA 12 does
    Guard().setDevice({CUDA, (c10::DeviceIndex)device});
    use_device(device);
  });
  m.def("elapsed", [](size_t from, size_t to) { return Guard().elapsedTime((void*)from, (void*)to, 0); });
  m.def("seed", [](uint64_t seed, int device) {
    auto generator = hooks.getDefaultGenerator(device);
    std::lock_guard held(generator.mutex());
    generator.set_current_seed(seed);
  });
  m.def("generator", [](int device) { return hooks.getDefaultGenerator(device).get_state(); });
  m.def("set_generator", [](int device, const Tensor& state) {
    auto generator = hooks.getDefaultGenerator(device);
    std::lock_guard held(generator.mutex());
    generator.set_state(state);
  });
  m.def("memory", [](int device) {
    std::lock_guard held(memory_lock);
    auto& found = memory_of(device);
    return py::dict(py::arg("allocated") = found.allocated, py::arg("peak") = found.peak, py::arg("bytes") = knobs.bytes,
                    py::arg("reserved") = found.reserved, py::arg("peak_reserved") = found.peak_reserved);
  });
  m.def("reset_peak", [](int device) {
    std::lock_guard held(memory_lock);
    auto& found = memory_of(device);
    found.peak = found.allocated;
    found.peak_reserved = found.reserved;
  });
  m.def("pin", [](size_t at, size_t size) { pin((void*)at, (void*)at, size); });
  m.def("unpin", [](size_t at) { unpin((void*)at); });
  m.def("fault", [](const std::string& why) { fail(why); });
  m.def("forget_fault", [] { std::lock_guard held(fault_lock); return std::exchange(fault, ""); });
  m.def("exchanges", [] {
    std::lock_guard held(clocks.lock);
    std::vector<std::pair<std::string, uint32_t>> found;
    for (auto& x : clocks.exchanges) found.emplace_back(x.what, x.behind);
    return found;
  });
  m.def("enqueue", [](int device, int64_t stream, py::function f) {  // a function of the host, as kernels that take long
    auto kept = std::shared_ptr<py::function>(new py::function(f), [](auto* f) { py::gil_scoped_acquire held; delete f; });
    queue(device, stream).put([kept] { py::gil_scoped_acquire held; (*kept)(); });
  });
  py::class_<Nccl, c10d::Backend, c10::intrusive_ptr<Nccl>>(m, "Nccl")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>, int, int>());
}
