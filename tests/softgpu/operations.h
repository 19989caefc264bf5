// Operations: what memory they use goes to the clocks, what they compute to a stream, where the CPU's kernel does it later.
#pragma once
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <atomic>
#include <unordered_set>

#include "guard.h"

using c10::IValue;
using at::Tensor;
using Change = std::function<Tensor(const Tensor&)>;

inline bool on_device(const Tensor& t) { return t.defined() && t.device().type() == CUDA; }

// A CPU tensor over the memory that kernels see of `t`.
inline Tensor kernels_view(const Tensor& t) {
  char* at = on_device(t) ? real_address(t.storage().data(), t.device().index()) : nullptr;
  if (!on_device(t)) {
    std::lock_guard held(clocks.lock);
    auto* block = pinned_at(t.storage().data());
    if (!block) return t;
    at = block->real + ((char*)t.storage().data() - block->at);
  }
  auto options = at::TensorOptions().dtype(t.dtype());
  auto view = at::from_blob(at ? at + t.storage_offset() * t.itemsize() : nullptr, t.sizes(), t.strides(), [](void*) {}, options);
  if (t.is_conj()) view._set_conj(true);
  if (t.is_neg()) view._set_neg(true);
  return view;
}

inline void add_access(std::vector<Access>& all, const Tensor& t, bool writes) {  // with clocks.lock held
  if (!t.defined() || !t.has_storage() || !t.numel()) return;
  Traced* memory = on_device(t) ? (Traced*)(Block*)t.storage().data_ptr().get_context() : pinned_at(t.storage().data());
  if (!memory) return;
  size_t start = t.storage_offset(), last = start;
  for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
  if (!on_device(t)) start += ((char*)t.storage().data() - ((Pinned*)memory)->at) / t.itemsize(), last += start - t.storage_offset();
  all.push_back({memory, writes, start * t.itemsize(), (last + 1) * t.itemsize()});
}
inline std::atomic<int64_t> kernels = 0;

inline void issue(Queue& stream, const char* what, const std::vector<Tensor>& reads, const std::vector<Tensor>& writes) {
  ++kernels;
  {
    std::lock_guard held(clocks.lock);
    std::vector<Access> all;
    for (auto& t : reads) add_access(all, t, false);
    for (auto& t : writes) add_access(all, t, true);
    auto count = clocks.issue(stream.lane, what, all);
    for (auto* list : {&reads, &writes})
      for (auto& t : *list)
        if (auto* block = on_device(t) || !t.defined() || !t.has_storage() ? nullptr : pinned_at(t.storage().data()))
          use_pinned(*block, {stream.lane, count, list == &writes, 0, 0, what});
  }
  tell_races();
}
inline const char* lasting(const std::string& name) {
  static std::mutex lock;
  static auto& names = *new std::unordered_set<std::string>;
  std::lock_guard held(lock);
  return names.insert(name).first->c_str();
}

inline IValue mapped(const IValue& value, const Change& change, c10::DeviceType to) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(change(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (auto& t : value.toTensorVector()) list.push_back(change(t));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (std::optional<Tensor> t : value.toOptionalTensorList())
      list.push_back(t && t->defined() ? std::optional<Tensor>(change(*t)) : t);
    return list;
  }
  return value.isDevice() && value.toDevice().type() == CUDA ? IValue(c10::Device(to)) : value;
}
inline std::vector<Tensor> tensors_in(const IValue& value) {
  std::vector<Tensor> found;
  mapped(value, [&](const Tensor& t) { found.push_back(t); return t; }, CUDA);
  return found;
}
inline Tensor as_meta(const Tensor& t) {
  auto meta = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kMeta).pinned_memory(false));
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) meta.unsafeGetTensorImpl()->set_wrapped_number(true);
  return meta;
}
inline Tensor as_kernels_see(const Tensor& t) {
  if (on_device(t)) return kernels_view(t);
  auto copy = t.defined() ? t.clone() : t;  // numbers go by value
  if (copy.defined() && t.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}
inline Tensor like(const Tensor& t, c10::Device device) {
  return t.defined() ? at::empty_strided(t.sizes(), t.strides(), t.options().device(device)) : t;
}

const Tensor& resize_(const Tensor& t, c10::IntArrayRef size, std::optional<at::MemoryFormat>);

// One call of an operation that torch has no CUDA kernel for, which here are all.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack& stack)
      : op_(op), schema_(op.schema()), size_(schema_.arguments().size()), name_(lasting(schema_.name())),
        args_(stack.end() - size_, stack.end()), device_(the_device()) {}
  c10::Device device() const { return device_; }

  std::vector<IValue> carry_out() {
    bool drawn = is("aten::native_dropout");
    for (auto& argument : schema_.arguments()) drawn |= argument.name() == "generator";
    bool asked = VALUES.count(name_), known = !asked && !drawn && sized();
    auto& stream = here(device_.index());
    auto written = some(true);
    for (size_t r = 0; r < results_.size(); ++r)
      if (is_new(r)) for (auto& t : tensors_in(results_[r])) written.push_back(t);
    issue(stream, name_, some(false), written);
    torch::jit::Stack cpu;
    std::vector<std::pair<Tensor, Tensor>> outs;  // what is there for results, and what the CPU makes, resized meanwhile
    for (size_t i = 0; i < size_; ++i) {
      bool generator = args_[i].isGenerator() || schema_.arguments()[i].name() == "generator";
      cpu.push_back(generator ? at::detail::getCUDAHooks().getDefaultGenerator(device_.index())
                              : mapped(args_[i], as_kernels_see, at::kCPU));
      if (!is_out(i)) continue;
      outs.emplace_back(cpu[i].toTensor(), at::empty({0}, cpu[i].toTensor().options()));
      cpu[i] = outs.back().second;
    }
    if (known) {
      std::vector<IValue> to;
      for (size_t r = 0; r < results_.size(); ++r)
        to.push_back(is_new(r) ? mapped(results_[r], as_kernels_see, at::kCPU) : IValue());
      bool of_norm = is("aten::native_layer_norm_backward");
      stream.put([op = op_, cpu = std::move(cpu), to = std::move(to), outs = std::move(outs), of_norm]() mutable {
        if (of_norm)  // CUDA keeps mean and deviation in 32 bits, the CPU in those of the weights
          for (size_t i : {3, 4}) if (cpu[5].isTensor()) cpu[i] = cpu[i].toTensor().to(cpu[5].toTensor().scalar_type());
        op.callBoxed(&cpu);
        copy(cpu, to);
        for (auto& [there, here] : outs) there.copy_(here);
      });
      return results_;
    }
    if (asked) host_waits(mark(stream), name_);
    else sleep_until(*mark(stream));  // CUDA wouldn't: it draws there, and has sizes that we don't
    raise_fault();
    {
      at::AutoDispatchBelowAutograd below;
      if (drawn) call_drawing(&cpu);
      else op_.callBoxed(&cpu);
      for (auto& [there, here] : outs) there.copy_(here);
    }
    results_.clear();
    for (size_t r = 0; r < cpu.size(); ++r) {
      bool tensors = cpu[r].isTensor() || cpu[r].isTensorList();
      results_.push_back(!is_new(r) ? written_for(r) : !tensors ? cpu[r] : mapped(cpu[r], [&](const Tensor& t) {
        Tensor there = like(t, device_);
        if (!there.defined()) return there;
        sleep_until(*mark(stream));  // what is new there
        kernels_view(there).copy_(t);
        issue(stream, name_, {}, {there});
        return there;
      }, CUDA));
    }
    return results_;
  }

 private:
  // The host needs values of the device.
  static inline const auto& VALUES = *new std::unordered_set<std::string>{
      "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2",
      "aten::unique_consecutive", "aten::is_set_to", "aten::allclose"};
  bool is(const char* name) const { return schema_.name() == name; }
  bool is_new(size_t r) const { return !schema_.returns()[r].alias_info(); }
  bool writes(size_t i) const { auto* alias = schema_.arguments()[i].alias_info(); return alias && alias->isWrite(); }
  bool is_out(size_t i) const { return writes(i) && schema_.arguments()[i].is_out() && args_[i].isTensor(); }

  c10::Device the_device() const {
    std::optional<c10::Device> found;
    auto refuse = [&](const Tensor& t) {
      TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, ", *found, " and ",
                  t.device(), "! (", name_, ")");
    };
    for (auto& value : args_) for (auto& t : tensors_in(value)) if (on_device(t)) {
      if (found && t.device() != *found) refuse(t);
      found = t.device();
    }
    bool indexed = schema_.name().rfind("aten::index", 0) == 0 || schema_.name().rfind("aten::_index", 0) == 0;
    if (found && !indexed) for (auto& value : args_) for (auto& t : tensors_in(value)) if (!on_device(t) && t.dim()) refuse(t);
    return found.value_or(c10::Device(CUDA, current));
  }
  std::vector<Tensor> some(bool written) const {
    std::vector<Tensor> found;
    for (size_t i = 0; i < size_; ++i)
      if (writes(i) == written) for (auto& t : tensors_in(args_[i])) found.push_back(t);
    return found;
  }
  IValue written_for(size_t r) const {
    for (size_t i = 0; i < size_; ++i)
      if (writes(i) && schema_.arguments()[i].alias_info()->beforeSets() == schema_.returns()[r].alias_info()->beforeSets())
        return args_[i];
    TORCH_CHECK(false, "a view that isn't there: ", name_);
  }
  // Make room for the results, as large as the operation on meta tensors says; False if it doesn't.
  bool sized() {
    bool any_new = false, resized = false;
    for (size_t r = 0; r < schema_.returns().size(); ++r) any_new |= is_new(r);
    for (size_t i = 0; i < size_; ++i) resized |= is_out(i) && !args_[i].toTensor().numel();
    torch::jit::Stack meta;
    if (any_new || resized) for (auto& value : args_) meta.push_back(mapped(value, as_meta, at::kMeta));
    auto asked = meta;
    if (any_new || resized) try { op_.callBoxed(&meta); }
      catch (const c10::NotImplementedError&) { return false; }
      catch (const pybind11::error_already_set&) { return false; }
    for (size_t r = 0; any_new && r < meta.size(); ++r) if (!meta[r].isTensor() && !meta[r].isTensorList()) return false;
    for (size_t i = 0; resized && i < size_; ++i) if (is_out(i)) {
      Tensor t = args_[i].toTensor(), to = asked[i].toTensor();
      if (t.sizes() == to.sizes()) continue;
      resize_(t, to.sizes(), std::nullopt);
      t.unsafeGetTensorImpl()->set_sizes_and_strides(to.sizes(), to.strides());
    }
    for (size_t r = 0; r < schema_.returns().size(); ++r)
      results_.push_back(is_new(r) ? mapped(meta[r], [&](const Tensor& t) { return like(t, device_); }, CUDA) : written_for(r));
    return true;
  }
  // Draw from the device's generator, also where the CPU's kernel takes none: dropout.
  void call_drawing(torch::jit::Stack* cpu) const {
    auto host = at::detail::getDefaultCPUGenerator(), own = at::detail::getCUDAHooks().getDefaultGenerator(device_.index());
    auto kept = host.get_state();
    host.set_state(own.get_state());
    op_.callBoxed(cpu);
    if (is("aten::native_dropout")) own.set_state(host.get_state());
    host.set_state(kept);
  }
  static void copy(const std::vector<IValue>& from, const std::vector<IValue>& to) {
    for (size_t r = 0; r < to.size(); ++r) {
      auto there = tensors_in(to[r]), here = tensors_in(to[r].isNone() ? to[r] : from[r]);
      for (size_t i = 0; i < there.size(); ++i)
        if (here[i].numel()) there[i].copy_(here[i]);  // the CPU leaves out what it doesn't need
    }
  }

  const c10::OperatorHandle& op_;
  const c10::FunctionSchema& schema_;
  size_t size_;
  const char* name_;
  std::vector<IValue> args_, results_;
  c10::Device device_;
};

inline void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  raise_fault();
  Call call(op, *stack);
  c10::OptionalDeviceGuard guard(call.device());
  auto results = call.carry_out();
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (auto& result : results) stack->push_back(result);
}

// --- what has kernels of its own ---
inline Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                    std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}
inline Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                            std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}
inline Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (to.is_same(from) || !to.numel()) return to;
  bool up = !on_device(from), down = !on_device(to);
  c10::OptionalDeviceGuard guard(down ? from.device() : to.device());
  auto source = from.expand(to.sizes());
  bool pinned = !(up || down) || at::detail::getCUDAHooks().isPinnedPtr((up ? from : to).storage().data());
  const char* name = up ? "a copy to the device" : down ? "a copy to the host" : "aten::copy_";
  auto& stream = here(current);
  issue(stream, name, {source}, {to});
  Tensor kept = up ? source : to, a = kernels_view(to), b = up && !pinned ? source.clone() : kernels_view(source);  // the driver's
  stream.put([a, b, kept] { a.copy_(b); });
  if ((up || down) && !(non_blocking && (pinned || (up && from.nbytes() <= 65536)))) host_waits(mark(stream), name);
  return to;
}
inline Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  Tensor there = to;
  return copy_(there, from, non_blocking);
}
inline void record_stream(Tensor& t, c10::Stream stream) { Guard().recordDataPtrOnStream(t.storage().data_ptr(), stream); }
inline Tensor& set_source(Tensor& t, at::Storage storage, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  auto* impl = t.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_storage_offset(offset);
  if (stride.data() && stride.size() == size.size()) impl->set_sizes_and_strides(size, stride);
  else impl->set_sizes_contiguous(size);
  return t;
}
inline Tensor& set_storage(Tensor& t, at::Storage storage) {
  return set_source(t, storage, 0, {(int64_t)(storage.nbytes() / t.itemsize())}, {});
}
inline Tensor& set_tensor(Tensor& t, const Tensor& other) {
  return set_source(t, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}
inline const Tensor& resize_(const Tensor& t, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  size_t need = (c10::multiply_integers(size) + t.storage_offset()) * t.itemsize();
  if (t.storage().nbytes() < need) {
    c10::OptionalDeviceGuard guard(t.device());
    t.storage().set_data_ptr(device_allocator.allocate(need));
    t.storage().set_nbytes(need);
  }
  t.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return t;
}
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("record_stream", record_stream);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("set_.source_Storage_storage_offset", set_source);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("resize_", resize_);
}
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
