#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "data/document_ids.h"
#include "engine/evaluation/generator.h"
#include "engine/planning/step_model.h"

// The commands `parka <command>`. They print to standard output, and return the exit code or throw Error.
namespace parka {

// The ranks that a command starts on this host; one is 0. Neither: one rank, or a launcher's.
struct StartedRanks {
  int ranks = 0;  // on the device that the config says
  int gpus = 0;   // one on each of so many GPUs
};

struct TrainOptions {
  std::string config_path;
  std::vector<std::string> overrides;
  StartedRanks started;
  bool must_be_new = false;       // refuse to start where checkpoints exist
  bool convert_states = false;    // resume with other formats of masters and moments
  std::string follow = {};        // "http,wandb": to which sinks `parka follow` sends the run; empty: to none
  std::string command_line = {};  // as it was given, for the record of the start
};
int run_train(const TrainOptions& options);

struct PlanOptions {
  std::string config_path;
  std::vector<std::string> overrides;
  int64_t num_gpus = 1;
  double memory_limit_gb = 80.0;  // 1e9 bytes per GPU
  std::string card = {};          // a name of card_names(); empty: none was named
  bool json = false;
  std::string write_path = {};  // of a config with the changes that make it fit; empty: none is written
  bool fit = false;             // print the cheapest changes, instead of the plan of the config as it is
  double host_memory_gb = 0;    // likewise, of one host for all its GPUs; 0: this one's, if it has the GPUs

  // To predict the time of a step from a measurement of one GPU; docs/scaling.md says where the defaults come from.
  std::string measured_path, compare_path;
  int64_t nodes = 0;                                                         // 0: nodes of eight GPUs
  double link_bandwidth = 340, network_bandwidth = 50, host_bandwidth = 55;  // 1e9 bytes per second
};
int run_plan(const PlanOptions& options);
int run_fit(const PlanOptions& options);  // with --fit

// Without data, sets and tasks: what the checkpoint's config evaluates on.
struct EvalOptions {
  std::string checkpoint;          // a checkpoint, or a run folder: its newest
  std::vector<std::string> data;   // token files
  std::vector<std::string> sets;   // NAME=FILE, see EvaluationConfig
  std::vector<std::string> tasks;  // request files
  std::vector<std::string> overrides;
  int64_t max_sequences = 0;  // of data and of each set; 0: all
  int64_t max_documents = 0;  // of each task; 0: all
  std::string predictions;    // file to write with the log-likelihood of every choice; empty: none
  bool json = false;
};
int run_eval(const EvalOptions& options);

struct GenerateOptions {
  std::string checkpoint;
  std::vector<std::string> overrides;
  std::vector<std::string> prompts;        // text
  std::vector<std::string> prompt_tokens;  // comma-separated token ids
  std::string tokenizer;                   // its folder; empty: the checkpoint's own
  std::vector<std::string> images;         // files of pictures that the prompt shows
  std::string geometry;                    // how they become squares; empty: as the model's processor does
  bool chat = false;                       // take turns with standard input
  std::string system;                      // message of the chat; empty: none
  int64_t num_tokens = 200;
  SamplingOptions sampling;
  std::vector<int32_t> stop_tokens;
  int64_t batch = 8;  // prompts at a time
  bool json = false;
};
int run_generate(const GenerateOptions& options);

struct ImportOptions {
  std::string folder;                       // of a Hugging Face model, or of peft's adapters
  std::string base = {};                    // the checkpoint that adapters belong to
  std::string vision_tower = {};            // folder of a tower that the language model gets
  std::optional<int64_t> image_token = {};  // the id of image slots then; none: the first after the vocabulary
  std::string output;
  std::string finetune = {};  // "lora", "qlora" or "qst": what the config does; empty: it trains all weights
};
int run_import(const ImportOptions& options);

struct ExportOptions {
  std::string checkpoint;
  std::string output;
  // "bf16", "fp16" or "fp32"; empty: as imported, or the run's compute format.
  std::string dtype = {};
  // A model_type; empty: that of the model that it comes from, or the first that can express this model.
  std::string family = {};
  // A Hugging Face folder whose tokenizer the export copies; empty: that of the imported model, if known.
  std::string like = {};
  // The weights that adapters were trained beside; empty: those that the checkpoint names.
  std::string base = {};
  // "5GB"; empty: transformers' default.
  std::string shard_size = {};
  bool adapter = false;  // the adapters alone, as peft has them
};
int run_export(const ExportOptions& options);

struct BenchOptions {
  std::string config_path;
  std::vector<std::string> overrides;
  StartedRanks started;
  int64_t steps = 5;      // that are timed
  bool roofline = false;  // also measure the least time of each op
  std::string json_path;  // empty: none is written
};
int run_bench(const BenchOptions& options);

struct TuneOptions {
  std::string config_path;
  std::vector<std::string> overrides;
  std::string output;
  int64_t candidates = 64;  // per GEMM
  double seconds = 150;     // of measuring, at most
};
int run_tune(const TuneOptions& options);

struct TunePrecisionOptions {
  std::string config_path;
  std::vector<std::string> overrides;
  std::string write_path;     // the config to write
  double rise_percent = 0.5;  // of the perplexity, over that without FP8
  int64_t sequences = 256;
};
int run_tune_precision(const TunePrecisionOptions& options);

struct DataOptions {
  std::vector<std::string> inputs;  // token files or patterns, or one config (*.json)
  std::vector<std::string> overrides;
  std::string dtype;         // of raw token files: uint16, uint32; empty: uint16
  DocumentIds document_ids;  // where none is given index or mask tell
  int64_t show = 0;          // sequences to print, in place of what is in the files
  std::string tokenizer;     // folder of it; empty: data.tokenizer, or what lies beside the files
  bool json = false;
};
int run_data(const DataOptions& options);

struct ConfigOptions {
  enum class Action { kCheck, kShow, kSchema, kReference };
  Action action = Action::kCheck;
  std::string config_path;
  std::vector<std::string> overrides;
};
int run_config(const ConfigOptions& options);

struct VersionOptions {
  bool verbose = false;
};

// Parses the command line and runs the command; the exit code of the process. Prints every error as one line.
int run_command_line(int argc, char** argv);

}  // namespace parka
