#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "core/config_fields.h"
#include "core/parameter.h"
#include "data/token_files.h"
#include "model/micro_batch.h"
#include "model/model_config.h"
#include "optim/optimizer_config.h"

// The whole configuration of a run as one typed tree. Paths in it are relative to the current directory.
namespace parka {

// Tokens see what stands before them in their sequence, or in their document only.
enum class DocumentMode : uint8_t { kJoined, kSeparate };

struct DataConfig {
  std::vector<std::string> train;
  std::vector<double> weights;
  std::vector<std::string> eval;
  TokenType token_dtype = TokenType::kUint16;
  int64_t sequence_length = 2048;
  int64_t seed = 6198;
  bool shuffle = true;
  bool loss_mask = false;
  DocumentMode documents = DocumentMode::kJoined;
  int64_t document_start = -1;
  int64_t document_end = -1;
  bool checksum = false;
  int64_t images_per_sequence = 0;
  std::string tokenizer = {};

  DocumentIds document_ids() const { return {document_start, document_end}; }

  bool operator==(const DataConfig&) const = default;

  template <typename Visitor>
  void fields(Visitor& visit) {
    visit(
        "train", train,
        "Sources of tokens, each a file or a pattern like \"wiki/*.npy\": raw ids (OLMo's .npy files), Megatron's "
        ".bin with its .idx, or llm.c's .bin; see docs/data.md",
        kHashed | kFixedOnResume);
    visit("weights", weights,
          "Share of each entry of train in every batch, by number of tokens (only the ratios count); []: all "
          "entries are one source, read once per epoch",
          RealRange{}, kHashed | kFixedOnResume);
    visit("eval", eval, "Held-out token files, in the same formats", kNoEffect);
    visit("token_dtype", token_dtype, "Type of a token id in raw files; other formats store it",
          kHashed | kFixedOnResume);
    visit("sequence_length", sequence_length, "Tokens per training sequence; each file is cut into whole sequences",
          IntegerRange{2, kMaxDimension}, kHashed | kFixedOnResume | kStepTime);
    visit("seed", seed, "Seed of the data order; epoch e uses seed + e", IntegerRange{}, kHashed | kFixedOnResume);
    visit("shuffle", shuffle,
          "Shuffle the sequences of each epoch (in OLMo's order); false reads them in file order",
          kHashed | kFixedOnResume);
    visit("loss_mask", loss_mask,
          "Compute the loss only on tokens that a mask file beside each token file (x.npy.mask) marks, as in "
          "fine-tuning",
          kHashed | kFixedOnResume);
    visit("documents", documents,
          "joined: a token attends to everything before it in its sequence; separate: only within its own document",
          kHashed | kFixedOnResume | kStepTime);
    visit(
        "document_start", document_start,
        "With documents = separate: the token id that begins a document, which may also be document_end; -1: none "
        "does",
        IntegerRange{-1, kMaxDimension}, kHashed | kFixedOnResume | kStepTime);
    visit(
        "document_end", document_end,
        "With documents = separate: the token id that ends a document; -1: none does. Without either id documents "
        "begin where Megatron's index or the mask file says",
        IntegerRange{-1, kMaxDimension}, kHashed | kFixedOnResume | kStepTime);
    visit("checksum", checksum,
          "Read all training files once at the start and keep their checksums in checkpoints, so that resuming "
          "detects any change; false: compare only names, sizes, beginnings and ends",
          kNoEffect);
    visit("images_per_sequence", images_per_sequence,
          "With model.vision.tower: for how many images of each sequence there is room, which every micro-batch "
          "computes, blank where there are fewer",
          IntegerRange{0, 65536}, kHashed | kStepTime);
    visit(
        "tokenizer", tokenizer,
        "Folder with the tokenizer.json of the token files, which the run copies for `parka generate` and `parka "
        "export`. Empty: that of checkpoint.init_from, else the folder `tokenizer` beside the first file of train, "
        "if there is one",
        MayBeEmpty{}, kNoEffect);
  }
};

enum class NonFinitePolicy : uint8_t { kStop, kSkip };

enum class BalanceForm : uint8_t { kPerBlock, kPooled };

struct TrainingConfig {
  int64_t steps = 1000;
  int64_t global_batch_size = 32;
  int64_t micro_batch_size = 4;
  int64_t seed = 6198;
  double z_loss = 0.0;
  double balance_loss = 0.0;
  BalanceForm balance_form = BalanceForm::kPerBlock;
  double router_z_loss = 0.0;
  double router_bias_rate = 0.0;
  int64_t eval_interval = 0;
  int64_t eval_sequences = 0;
  NonFinitePolicy non_finite = NonFinitePolicy::kStop;
  int64_t spike_window = 0;
  int64_t log_interval = 1;
  int64_t logits_chunk_tokens = 4096;

  bool operator==(const TrainingConfig&) const = default;

  template <typename Visitor>
  void fields(Visitor& visit) {
    constexpr IntegerRange batch{1, kMaxDimension};
    visit("steps", steps, "Optimizer steps to train for", IntegerRange{}, kNoEffect);
    visit("global_batch_size", global_batch_size, "Sequences per optimizer step over all ranks and accumulation",
          batch, kHashed | kFixedOnResume | kRunTime);
    visit("micro_batch_size", micro_batch_size,
          "Sequences per forward/backward on one rank; must divide global_batch_size", batch, kHashed | kStepTime);
    visit("seed", seed, "Seed of the weights and of stochastic rounding", IntegerRange{}, kHashed);
    visit("z_loss", z_loss,
          "Weight of the z-loss, the squared log-partition function (OLMo's option: 1e-4); 0: "
          "off",
          RealRange{}, kHashed);
    visit("balance_loss", balance_loss, "Weight of the loss that spreads tokens over experts (model.moe); 0: off",
          RealRange{}, kHashed);
    visit(
        "balance_form", balance_form,
        "per_block: a balance loss for each block, 1 where all experts have as many tokens (Megatron, OLMo-core); "
        "pooled: one for all blocks together, experts_per_token there (transformers)",
        kHashed);
    visit("router_z_loss", router_z_loss,
          "Weight of each router's z-loss, the mean of the squared log-partition function of its logits; 0: off "
          "(OLMoE: 0.001)",
          RealRange{}, kHashed);
    visit("router_bias_rate", router_bias_rate,
          "With model.moe.correction_bias: how far a step moves the bias of each expert towards as many tokens for "
          "all (DeepSeek-V3: 0.001); 0: it stays as it is, as in fine-tuning",
          RealRange{0.0, 1.0}, kHashed);
    visit("eval_interval", eval_interval, "Steps between evaluations, and one at the end; 0: never", IntegerRange{},
          kNoEffect);
    visit("eval_sequences", eval_sequences,
          "Held-out sequences per evaluation, spread evenly over the files; 0: all", IntegerRange{}, kNoEffect);
    visit("non_finite", non_finite,
          "NaN or Inf in loss or gradients: stop (exit code 3), or skip the step, but for ten in a row", kNoEffect);
    visit("spike_window", spike_window,
          "Skip the update of a step whose loss or gradient norm exceeds the mean of so many steps before it by "
          "six standard deviations; the first half window is not judged; 0: off (OLMo 2: 128)",
          IntegerRange{0, 65536}, kHashed);
    visit("log_interval", log_interval, "Steps between progress lines; metrics are written for every step",
          IntegerRange{1}, kNoEffect);
    visit("logits_chunk_tokens", logits_chunk_tokens,
          "Tokens whose logits are computed at a time; fewer take "
          "less memory",
          IntegerRange{1, kMaxDimension}, kHashed | kStepTime);
  }
};

enum class FinetuneMethod : uint8_t { kFull, kLora, kQst };

// True if the method, with qst also its way to read h, uses this key of FinetuneConfig.
bool is_used_by(FinetuneMethod method, Downsampling downsample, std::string_view key);

// What finetune.targets may hold, by transformers' names: those of attention, of feed-forwards that every token
// goes through, and of experts.
inline constexpr const char* kAdapterTargets[] = {
    "q_proj",          "k_proj",           "v_proj",    "o_proj",
    "gate_proj",       "up_proj",          "down_proj", "experts.gate_proj",
    "experts.up_proj", "experts.down_proj"};

struct FinetuneConfig {
  FinetuneMethod method = FinetuneMethod::kFull;
  BaseFormat base = BaseFormat::kCompute;
  int64_t rank = 16;
  double alpha = 16;
  bool rslora = false;
  double dropout = 0;
  std::vector<std::string> targets = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"};
  int64_t reduction = 16;
  Downsampling downsample = Downsampling::kAdapter;
  SideMix mix = SideMix::kAdditive;
  Storage kept = Storage::kCompute;

  bool operator==(const FinetuneConfig&) const = default;

  // The adapters of method = lora, and the side network of method = qst; none with others.
  LoraRules lora_rules() const;
  SideRules side_rules() const;

  template <typename Visitor>
  void fields(Visitor& visit) {
    visit(
        "method", method,
        "full: what optimizer.frozen leaves is trained; lora: adapters alone, beside frozen weights; qst: a narrow "
        "network beside the frozen model, through which no gradient goes (Quantized Side Tuning)",
        kModelField);
    visit(
        "base", base,
        "How the frozen weights of the blocks' linear layers are kept: compute (as precision says, with the weights in "
        "precision.compute); fp8: as the FP8 codes that GEMMs read, alone; nf4 or fp4: in 4 bits, with bitsandbytes' "
        "formats, and decoded before each product",
        kHashed | kFixedOnResume | kStepTime);
    visit("rank", rank, "lora: rank of each adapter; qst: of downsample = lora and adapter", IntegerRange{1, 65536},
          kModelField);
    visit("alpha", alpha, "lora: adapters are multiplied by alpha / rank", RealRange{},
          kHashed | kFixedOnResume | kWeights);
    visit("rslora", rslora, "lora: multiply adapters by alpha / sqrt(rank) instead, as in rsLoRA",
          kHashed | kFixedOnResume | kWeights);
    visit("dropout", dropout,
          "lora: probability with which each element of an adapter's input is left out in training, as in peft",
          RealRange{0.0, 1.0, true}, kHashed | kFixedOnResume | kStepTime);
    visit(
        "targets", targets,
        "lora: linear layers with adapters, of q_proj, k_proj, v_proj, "
        "o_proj, gate_proj, up_proj and down_proj, and of experts.gate_proj, experts.up_proj and experts.down_proj",
        kModelField);
    visit("reduction", reduction,
          "qst: what the model's width and feed-forward width are divided by, for those of the side network",
          IntegerRange{1, 65536}, kModelField);
    visit(
        "downsample", downsample,
        "qst: how a side layer reads what a frozen one hands on: linear; lora: by two factors; adapter: with SiLU "
        "between them; max_pool or avg_pool: groups of `reduction` numbers, without weights",
        kModelField);
    visit("mix", mix,
          "qst: how the side network's output joins the model's: additive: n + u, where u begins at 0; paper: "
          "a n + (1 - a) u, where a is learnt and begins at 1",
          kModelField);
    visit(
        "kept", kept,
        "qst: how what frozen layers hand on is kept for the weights that read it: compute, or fp8 (one scale per 1 x "
        "precision.group_size)",
        kModelField);
  }
};

struct CheckpointConfig {
  std::string folder = "runs/run";
  int64_t interval = 0;
  int64_t keep = 3;
  bool async = true;
  bool save_final = true;
  std::string on_saved = {};
  std::string init_from = {};

  bool operator==(const CheckpointConfig&) const = default;

  template <typename Visitor>
  void fields(Visitor& visit) {
    visit("folder", folder, "Run folder: checkpoints, metrics.jsonl and the resolved config go here", kNoEffect);
    visit("interval", interval, "Steps between saves; 0: never", IntegerRange{}, kNoEffect);
    visit("keep", keep, "Newest complete checkpoints to keep; 0: all", IntegerRange{}, kNoEffect);
    visit("async", async, "Write from a background thread while training continues", kNoEffect);
    visit("save_final", save_final, "Save after the last step", kNoEffect);
    visit(
        "on_saved", on_saved,
        "Shell command that rank 0 runs beside the training for each complete checkpoint, whose folder is {path}; empty: none",
        MayBeEmpty{}, kNoEffect);
    visit(
        "init_from", init_from,
        "Checkpoint, run folder or imported model whose weights a new run starts from, at step 0 and with a fresh "
        "optimizer; its number formats may differ. Empty: random weights",
        MayBeEmpty{}, kHashed);
  }
};

struct TelemetryConfig {
  int64_t interval = 0;

  bool operator==(const TelemetryConfig&) const = default;

  template <typename Visitor>
  void fields(Visitor& visit) {
    visit("interval", interval,
          "Steps between reports on FP8 tensors, attention, expanded moments, Muon's updates and experts, see "
          "docs/telemetry.md; 0: never. Does not change a bit of the training",
          IntegerRange{}, kNoEffect);
  }
};

struct EvaluationConfig {
  std::vector<std::string> sets;
  std::vector<std::string> tasks;
  int64_t task_documents = 0;
  std::vector<std::string> prompts;

  bool operator==(const EvaluationConfig&) const = default;

  template <typename Visitor>
  void fields(Visitor& visit) {
    visit("sets", sets,
          "Named sets of held-out token files, each with its own loss: NAME=FILE; entries with the same name are "
          "one set",
          kNoEffect);
    visit("tasks", tasks, "Request files of multiple-choice tasks, made by parka prepare-eval", kNoEffect);
    visit("task_documents", task_documents, "Documents of each task per evaluation, spread evenly over it; 0: all",
          IntegerRange{}, kNoEffect);
    visit(
        "prompts", prompts,
        "Texts that every evaluation goes on with, by 64 tokens of temperature 0.8, in the log, metrics.jsonl and the page",
        kNoEffect);
  }
};

struct DistributedConfig {
  int64_t zero_stage = 0;
  int64_t shard_size = 0;
  int64_t context_parallel = 1;
  int64_t expert_parallel = 1;

  bool operator==(const DistributedConfig&) const = default;

  template <typename Visitor>
  void fields(Visitor& visit) {
    visit("zero_stage", zero_stage,
          "ZeRO stage, what is sharded over the ranks: 0: nothing; 1: master weights and moments; 2: and "
          "gradients; 3: and weights",
          IntegerRange{0, 3}, kRunTime);
    visit("shard_size", shard_size,
          "Number of consecutive ranks to shard over, e.g. the GPUs of a node; groups of this size replicate each "
          "other and all-reduce their gradients once per step; 0: all ranks",
          IntegerRange{}, kRunTime);
    visit(
        "context_parallel", context_parallel,
        "Number of consecutive ranks that share each sequence, for long ones: each has a part of the tokens, and in "
        "attention a part of the heads. Divides the number of ranks, data.sequence_length and the numbers of heads, "
        "see docs/distributed.md",
        IntegerRange{1, 1024}, kRunTime);
    visit(
        "expert_parallel", expert_parallel,
        "Number of consecutive ranks that divide the experts of a mixture, each with whole ones, to which they send "
        "their tokens. Divides the number of ranks, shard_size and model.moe.num_experts, see docs/moe.md",
        IntegerRange{1, 512}, kRunTime);
  }
};

struct ReliabilityConfig {
  int64_t replay_interval = 500;
  int64_t state_interval = 100;

  bool operator==(const ReliabilityConfig&) const = default;

  template <typename Visitor>
  void fields(Visitor& visit) {
    visit("replay_interval", replay_interval,
          "Steps between replays: one micro-batch is computed twice, and its gradients must be bitwise equal; 0: "
          "never. Does not change a bit of the training",
          IntegerRange{}, kNoEffect);
    visit("state_interval", state_interval,
          "Steps between checks that weights and optimizer states do not change between two updates, and are the "
          "same on all ranks that hold them; also before each save; 0: never",
          IntegerRange{}, kNoEffect);
  }
};

enum class DeviceChoice : uint8_t { kAuto, kCpu, kCuda };

struct DeviceConfig {
  DeviceChoice kind = DeviceChoice::kAuto;
  std::string gemm_tuning = "auto";

  bool operator==(const DeviceConfig&) const = default;
  bool gemm_tuning_is_auto() const { return gemm_tuning == "auto"; }
  bool gemm_tuning_is_off() const { return gemm_tuning == "off" || gemm_tuning.empty(); }

  template <typename Visitor>
  void fields(Visitor& visit) {
    visit("kind", kind, "cuda: a GPU; cpu: the CPU; auto: a GPU if there is one", kNoEffect);
    visit(
        "gemm_tuning", gemm_tuning,
        "GEMM algorithms on a GPU. auto: a run takes a file for its GPU from configs/tuning, or tunes once where it "
        "is long, and keeps them in its folder; off, or empty: cuBLASLt's first choices; else a file that `parka "
        "tune` wrote for this GPU",
        MayBeEmpty{}, kStepTime);
  }
};

struct Config {
  ModelConfig model;
  PrecisionConfig precision;
  OptimizerConfig optimizer;
  DataConfig data;
  TrainingConfig training;
  FinetuneConfig finetune;
  CheckpointConfig checkpoint;
  TelemetryConfig telemetry;
  EvaluationConfig evaluation;
  DistributedConfig distributed;
  ReliabilityConfig reliability;
  DeviceConfig device;

  bool operator==(const Config&) const = default;

  // The largest batch that the model is given.
  BatchShape micro_batch_shape() const {
    BatchShape shape{training.micro_batch_size, data.sequence_length / distributed.context_parallel,
                     data.documents == DocumentMode::kSeparate, data.images_per_sequence};
    shape.context_size = distributed.context_parallel;
    return shape;
  }
  // The number of ranks that work on different sequences, rounded down.
  int64_t data_parallel(int64_t num_ranks) const { return num_ranks / distributed.context_parallel; }
  // True if so many ranks have whole micro-batches of a step.
  bool divides_batch(int64_t num_ranks) const {
    return num_ranks > 0 && num_ranks % distributed.context_parallel == 0 &&
           training.global_batch_size % data_parallel(num_ranks) == 0 &&
           training.global_batch_size / data_parallel(num_ranks) % training.micro_batch_size == 0;
  }
  int64_t micro_batches_per_step(int64_t num_ranks) const {
    return training.global_batch_size / data_parallel(num_ranks) / training.micro_batch_size;
  }
  // The rules of training for the parameters of the model.
  ParameterRules parameter_rules() const;

  template <typename Visitor>
  void fields(Visitor& visit) {
    visit("model", model, "Architecture");
    visit("precision", precision, "Number formats of forward and backward");
    visit("optimizer", optimizer, "AdamW, its states and its schedule");
    visit("data", data, "Token files and their order");
    visit("training", training, "Length, batch size, evaluation and handling of bad steps");
    visit("finetune", finetune, "What is trained of a model, see docs/finetuning.md");
    visit("checkpoint", checkpoint, "The run folder and when to save");
    visit("telemetry", telemetry, "Reports on FP8 in metrics.jsonl");
    visit("evaluation", evaluation,
          "Further evaluations every training.eval_interval steps, see docs/evaluation.md");
    visit("distributed", distributed, "Sharding over ranks");
    visit("reliability", reliability, "Checks for silent data corruption, see docs/reliability.md");
    visit("device", device, "The device that the run computes on");
  }
};

template <>
struct EnumNames<TokenType> {
  static constexpr EnumName<TokenType> kAll[] = {{TokenType::kUint16, "uint16"}, {TokenType::kUint32, "uint32"}};
};
template <>
struct EnumNames<DocumentMode> {
  static constexpr EnumName<DocumentMode> kAll[] = {{DocumentMode::kJoined, "joined"},
                                                    {DocumentMode::kSeparate, "separate"}};
};
template <>
struct EnumNames<DeviceChoice> {
  static constexpr EnumName<DeviceChoice> kAll[] = {
      {DeviceChoice::kAuto, "auto"}, {DeviceChoice::kCpu, "cpu"}, {DeviceChoice::kCuda, "cuda"}};
};
template <>
struct EnumNames<FinetuneMethod> {
  static constexpr EnumName<FinetuneMethod> kAll[] = {
      {FinetuneMethod::kFull, "full"}, {FinetuneMethod::kLora, "lora"}, {FinetuneMethod::kQst, "qst"}};
};
template <>
struct EnumNames<Downsampling> {
  static constexpr EnumName<Downsampling> kAll[] = {{Downsampling::kLinear, "linear"},
                                                    {Downsampling::kLora, "lora"},
                                                    {Downsampling::kAdapter, "adapter"},
                                                    {Downsampling::kMaxPool, "max_pool"},
                                                    {Downsampling::kAveragePool, "avg_pool"}};
};
template <>
struct EnumNames<SideMix> {
  static constexpr EnumName<SideMix> kAll[] = {{SideMix::kAdditive, "additive"}, {SideMix::kPaper, "paper"}};
};
template <>
struct EnumNames<BaseFormat> {
  static constexpr EnumName<BaseFormat> kAll[] = {{BaseFormat::kCompute, "compute"},
                                                  {BaseFormat::kFp8, "fp8"},
                                                  {BaseFormat::kNf4, "nf4"},
                                                  {BaseFormat::kFp4, "fp4"}};
};
template <>
struct EnumNames<BalanceForm> {
  static constexpr EnumName<BalanceForm> kAll[] = {{BalanceForm::kPerBlock, "per_block"},
                                                   {BalanceForm::kPooled, "pooled"}};
};
template <>
struct EnumNames<NonFinitePolicy> {
  static constexpr EnumName<NonFinitePolicy> kAll[] = {{NonFinitePolicy::kStop, "stop"},
                                                       {NonFinitePolicy::kSkip, "skip"}};
};

}  // namespace parka
