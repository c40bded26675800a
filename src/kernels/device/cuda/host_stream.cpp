#include "kernels/device/cuda/host_stream.h"

#include "kernels/device/cuda/check.h"

namespace parka::cuda {
namespace {

constexpr const char* kIn = "copy from host memory";
constexpr const char* kOut = "copy to host memory";

void queue_copies(const std::vector<HostStream::Copy>& copies, cudaStream_t stream, const char* what) {
  for (const HostStream::Copy& copy : copies) {
    check(cudaMemcpyAsync(copy.target, copy.source, static_cast<size_t>(copy.bytes), cudaMemcpyDefault, stream),
          what);
  }
}

}  // namespace

CudaHostStream::CudaHostStream(cudaStream_t stream, size_t num_slots) : stream_(stream), loaded_(num_slots) {
  check(cudaStreamCreateWithFlags(&in_, cudaStreamNonBlocking), "stream");
  check(cudaStreamCreateWithFlags(&out_, cudaStreamNonBlocking), "stream");
  check(cudaEventCreateWithFlags(&ready_, cudaEventDisableTiming), "event");
  check(cudaEventCreateWithFlags(&saved_, cudaEventDisableTiming), "event");
  for (cudaEvent_t& event : loaded_) check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "event");
}

CudaHostStream::~CudaHostStream() {
  cudaStreamSynchronize(in_);
  cudaStreamSynchronize(out_);
  for (const cudaEvent_t event : loaded_) cudaEventDestroy(event);
  cudaEventDestroy(saved_);
  cudaEventDestroy(ready_);
  cudaStreamDestroy(out_);
  cudaStreamDestroy(in_);
}

void CudaHostStream::follow_device() {
  check(cudaEventRecord(ready_, stream_), kIn);
  check(cudaStreamWaitEvent(in_, ready_), kIn);
}

void CudaHostStream::load(size_t slot, const std::vector<Copy>& copies) {
  check(cudaStreamWaitEvent(in_, saved_), kIn);
  queue_copies(copies, in_, kIn);
  check(cudaEventRecord(loaded_.at(slot), in_), kIn);
}

void CudaHostStream::wait_loaded(size_t slot) { check(cudaStreamWaitEvent(stream_, loaded_.at(slot)), kIn); }

void CudaHostStream::save(const std::vector<Copy>& copies) {
  check(cudaEventRecord(ready_, stream_), kOut);
  check(cudaStreamWaitEvent(out_, ready_), kOut);
  queue_copies(copies, out_, kOut);
  check(cudaEventRecord(saved_, out_), kOut);
}

void CudaHostStream::wait_saved() { check(cudaStreamWaitEvent(stream_, saved_), kOut); }

}  // namespace parka::cuda
