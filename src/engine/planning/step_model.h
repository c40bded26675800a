#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "engine/config/config.h"
#include "engine/config/config_io.h"
#include "engine/planning/bench.h"
#include "engine/step/recorded_step.h"

namespace parka {

// The time of a rank's own work, with no collective beside it.
struct WorkSeconds {
  std::function<double(const RecordedOp&)> of_op;
  // Bytes read and written per second: of zeros that are written, and of pieces of gradients that are added up.
  double copy_bandwidth = 0;
};

// The time of all of the step's own work.
double compute_seconds(const RecordedStep& step, const WorkSeconds& seconds);

// How the GPUs of a run are connected, and what communication costs the work beside it.
struct Links {
  int64_t nodes = 1;             // with as many GPUs each
  double link_bandwidth = 0;     // NCCL's bus bandwidth within a node, bytes per second
  double network_bandwidth = 0;  // of one GPU to other nodes, bytes per second
  double start_latency = 0;      // of a collective, in seconds; then of each hop of its ring
  double link_latency = 0;
  double network_latency = 0;
  double memory_bandwidth = 0;  // of a GPU, bytes read and written per second
  double host_bandwidth = 0;    // between a GPU and its host's memory, bytes per second in each direction
  // The cost of communication for the work beside it, in times of what its bytes take at memory_bandwidth.
  double interference = 0;
};

// The time of a collective of `num_gpus` GPUs alone. Rings, whose bus bandwidth is that of the slower of a GPU's
// links and a node's way out; sums that all keep (kAllReduce) go between nodes as trees. An all-to-all is no ring:
// each GPU sends to every other, over its own links and its own way into the network.
double collective_seconds(const Links& links, int64_t num_gpus, RecordedCollective::Kind kind, int64_t bytes);

struct StepPrediction {
  double seconds = 0;               // of a step; the sum of the next four
  double compute_seconds = 0;       // of the rank's own work, alone
  double slowed_seconds = 0;        // that this work takes longer beside communication
  double exposed_seconds = 0;       // that it waits for communication
  double host_exposed_seconds = 0;  // and for copies to or from host memory
  double communication_seconds = 0;
  double communicated_bytes = 0;                 // that a GPU sends
  double host_bytes_in = 0, host_bytes_out = 0;  // that it copies from and to host memory

  double hidden_fraction() const {  // of the communication; 1 where there is none
    return communication_seconds > 0 ? 1 - exposed_seconds / communication_seconds : 1;
  }
};
// Predicts a step of one rank of `mesh`, whose ranks are GPUs. Adding up pieces runs beside other work, which is
// taken to leave no multiprocessor idle for it.
StepPrediction predict_step(const RecordedStep& step, const WorkSeconds& seconds, const Links& links,
                            const Mesh& mesh);

// The clock of a device with two streams: one computes, on the other collectives run in their order, each as soon
// as the work that was queued before it is done. Beside them tensors pass between host memory and the device, in
// both directions at once, as HostStream orders them; that slows nothing. All times are in seconds from the start.
class StreamTimeline {
 public:
  // Work that takes `seconds` with no collective beside it.
  void compute(double seconds);
  // While it runs, work gets on at 1 - interference of its speed; interference is in [0, 1).
  void collective(double seconds, double interference);
  // Later work starts when collective `number` is over; they count from 1, and 0 is none.
  void wait(uint64_t number);

  // HostStream's calls, with the seconds that the copies take.
  void follow_device();
  void load(size_t slot, double seconds);
  void wait_loaded(size_t slot);
  void save(double seconds);
  void wait_saved();

  // Acts as if what was queued since `before` were queued so many times more, each of which takes as long.
  void repeat_since(const StreamTimeline& before, int64_t times);

  double now() const { return now_; }  // when the work queued so far is done
  // Parts of now(): what work took longer for collectives beside it, and what it waited for them.
  double slowed_seconds() const { return slowed_; }
  double exposed_seconds() const { return exposed_; }
  double host_exposed_seconds() const { return host_exposed_; }  // waited for copies to or from host memory
  // All collectives, one after the other.
  double communication_seconds() const { return communication_; }

 private:
  void wait_for_host(double until);
  double collectives_end() const { return collectives_.empty() ? now_ : collectives_.back().end; }

  struct Collective {
    double end, interference;
  };
  std::vector<Collective> collectives_;
  size_t running_ = 0;  // the first of them that may not be over
  double now_ = 0, slowed_ = 0, exposed_ = 0, communication_ = 0;
  double loads_end_ = 0, saves_end_ = 0, host_exposed_ = 0;
  std::map<size_t, double> loaded_;  // when each buffer is
};

// A measurement of `parka bench --json`.
struct StepMeasurement {
  std::string path, device;
  int64_t ranks = 1;
  Config config;
  double step_seconds = 0;       // median
  double host_wait_seconds = 0;  // of a step that waited for states from and to host memory
  double copy_bandwidth = 0;     // bytes per second, read and written
  std::vector<OpSummary> ops;    // of one rank and one step

  int64_t tokens_per_step() const { return config.training.global_batch_size * config.data.sequence_length; }
  double tokens_per_second_per_gpu() const {
    return static_cast<double>(tokens_per_step()) / step_seconds / static_cast<double>(ranks);
  }
  // Names of the ops that are a product with what reads it, which was one kernel: the config does not say.
  std::set<std::string> one_kernel() const;
  int64_t num_micro_batches() const { return config.micro_batches_per_step(ranks); }
};

// Throws Error(kBadInput) for a file that is none, or has times that cannot be.
StepMeasurement read_step_measurement(const std::string& path);

// The time of work by a measurement on one GPU, so that the measured step takes as long as it did. Throws
// Error(kBadInput) for a measurement on several GPUs.
WorkSeconds measured_work(const StepMeasurement& one);

// Throws Error(kBadInput) naming the keys of `speed` in which `config` differs from the measured one.
void require_same_speed(const StepMeasurement& measured, const Config& config, SpeedOf speed);

// The step of a rank of `num_gpus` under `config`, in whose time ops take what they took in a measurement on one
// GPU. `config` may differ from the measured one in what it is asked about: batch over accumulation and ranks,
// sharding, and which copies of weights are kept (SpeedOf::kOneGpu).
StepPrediction predict_step_by(const StepMeasurement& one, const Config& config, const Links& links,
                               int64_t num_gpus);

// Throws Error(kBadInput) unless `measured` is of `config` on `num_gpus` GPUs.
void require_measurement_of(const StepMeasurement& measured, const Config& config, int64_t num_gpus);

}  // namespace parka
