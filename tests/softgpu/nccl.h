// NCCL's semantics over gloo: a communicator has a stream of its own, which waits for the others; the host never does.
// A lost peer is no fault of the GPU: the stream hangs, and whoever asks of the communicator is told.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "operations.h"

using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class Lost {  // why a communicator's exchanges fail, if they do
 public:
  void keep(const std::string& why) { std::lock_guard held(lock_); why_ = why; }
  void raise() {
    raise_fault();
    std::lock_guard held(lock_);
    if (!why_.empty()) C10_THROW_ERROR(DistBackendError, "NCCL error in: softgpu, remote process exited\nLast error:\n" + why_);
  }

 private:
  std::mutex lock_;
  std::string why_;
};
using LostPtr = std::shared_ptr<Lost>;

struct StreamWork final : c10d::Work {
  StreamWork(MarkPtr end, Tensors kept, int device, LostPtr lost) : end_(end), kept_(kept), device_(device), lost_(lost) {}
  bool isCompleted() override {
    lost_->raise();
    if (end_->reached()) host_knows(end_->clock);
    return end_->reached();
  }
  bool isSuccess() const override { return end_->reached(); }
  bool wait(std::chrono::milliseconds) override {
    lost_->raise();
    auto& stream = here(device_);
    let_wait(stream, end_);
    { std::lock_guard held(clocks.lock); clocks.exchange("wait", stream.lane, device_); }
    kept_.clear();
    return true;
  }
  void synchronize() override { wait({}); }
  Tensors result() override { return kept_; }

 private:
  MarkPtr end_;
  Tensors kept_;
  int device_;
  LostPtr lost_;
};

class Nccl final : public c10d::Backend {
 public:
  Nccl(c10::intrusive_ptr<c10d::Backend> gloo, int rank, int size) : Backend(rank, size), gloo_(gloo) {}
  const std::string getBackendName() const override { return "nccl"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }
  void setTimeout(std::chrono::milliseconds) override {}
  void abort() override {}
  void shutdown() override {}

  WorkPtr send(Tensors& t, int to, int) override {
    return issue_it("send", t, {}, [=, this, v = seen(t)]() mutable { return gloo_->send(v, to, 0); });
  }
  WorkPtr recv(Tensors& t, int from, int) override {
    return issue_it("recv", {}, t, [=, this, v = seen(t)]() mutable { return gloo_->recv(v, from, 0); });
  }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& options) override {
    return issue_it("all_reduce", {}, t, [=, this, v = seen(t)]() mutable { return gloo_->allreduce(v, options); });
  }
  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& options) override {
    bool root = options.rootRank == getRank();
    return issue_it("broadcast", root ? t : Tensors{}, root ? Tensors{} : t,
                    [=, this, v = seen(t)]() mutable { return gloo_->broadcast(v, options); });
  }
  WorkPtr allgather(std::vector<Tensors>& out, Tensors& t, const c10d::AllgatherOptions& options) override {
    return issue_it("all_gather", t, out[0], [=, this, v = seen(t), w = std::vector<Tensors>{seen(out[0])}]() mutable {
      return gloo_->allgather(w, v, options);
    });
  }
  WorkPtr alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& coming, std::vector<int64_t>& going,
                        const c10d::AllToAllOptions& options) override {
    return issue_it("all_to_all", {in}, {out}, [=, this, a = kernels_view(out), b = kernels_view(in)]() mutable {
      return gloo_->alltoall_base(a, b, coming, going, options);
    });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    auto one = at::empty({1}, at::TensorOptions().device(c10::Device(CUDA, current)));
    return issue_it("barrier", {}, {one}, [=, this] { return gloo_->barrier(options); });
  }

 private:
  static Tensors seen(const Tensors& all) {
    Tensors found;
    for (auto& t : all) found.push_back(kernels_view(t));
    return found;
  }
  template <typename F>
  WorkPtr issue_it(const char* what, const Tensors& reads, const Tensors& writes, F&& exchange) {
    lost_->raise();
    Tensors all(reads);
    all.insert(all.end(), writes.begin(), writes.end());
    for (auto& t : all) {
      TORCH_CHECK(on_device(t), "NCCL: tensors must be on a GPU");
      TORCH_CHECK(t.is_contiguous(), "NCCL: tensors must be contiguous");
    }
    int device = all.at(0).device().index();
    if (stream_ < 0) stream_ = Guard().getNewStream({CUDA, (c10::DeviceIndex)device}, 0).id();
    auto& own = queue(device, stream_);
    let_wait(own, mark(here(device)));
    issue(own, what, reads, writes);
    { std::lock_guard held(clocks.lock); clocks.exchange(what, own.lane, device); }
    own.put([exchange = std::forward<F>(exchange), lost = lost_]() mutable {
      try { exchange()->wait(); } catch (const std::exception& error) { lost->keep(error.what()); Mark().wait(); }
    });
    return c10::make_intrusive<StreamWork>(mark(own), all, device, lost_);
  }
  c10::intrusive_ptr<c10d::Backend> gloo_;
  int64_t stream_ = -1;
  LostPtr lost_ = std::make_shared<Lost>();
};
