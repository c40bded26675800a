#include <CLI/CLI.hpp>

#include <algorithm>
#include <charconv>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <regex>

#include <fmt/ranges.h>

#include "comm/launch/launch_checks.h"
#include "core/error.h"
#include "core/log/log.h"
#include "core/open_files.h"
#include "core/parallel.h"
#include "engine/commands/argument_values.h"
#include "engine/commands/command_help.h"
#include "engine/commands/commands.h"
#include "engine/commands/version.h"
#include "engine/config/config_io.h"
#include "engine/config/data_description.h"
#include "engine/files/file_io.h"
#include "engine/planning/card_speed.h"
#include "engine/text/helper_process.h"

namespace parka {
namespace {

// Numbers; CLI11's own checks end their message with the largest number there is, in 309 digits.
CLI::Validator number_that(const char* must, const char* name, bool (*holds)(double)) {
  return {[must, holds](std::string& text) {
            const std::optional<double> value = parse_finite(text);
            return value && holds(*value) ? std::string() : fmt::format("got {}; it must {}", text, must);
          },
          name};
}
const CLI::Validator kNotNegative =
    number_that("be a non-negative number", "NONNEGATIVE", [](double x) { return x >= 0; });
const CLI::Validator kSeed(
    [](std::string& text) {
      uint64_t seed = 0;  // CLI11 takes what is too large as the largest there is
      const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), seed);
      if (error == std::errc() && end == text.data() + text.size()) return std::string();
      return fmt::format("got {}; it must be a whole number from 0 to 2^64 - 1", text);
    },
    "SEED");
// CLI11's own check says of 1.5 only that it is not in range 1 to 4096.
CLI::Validator whole_number(int64_t least, int64_t most) {
  return {[=](std::string& text) {
            int64_t number = 0;
            const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
            const bool is_whole = error == std::errc() && end == text.data() + text.size();
            return is_whole && number >= least && number <= most
                       ? std::string()
                       : fmt::format("got {}; it must be a whole number from {} to {}", text, least, most);
          },
          fmt::format("INT in [{} - {}]", least, most)};
}
const CLI::Validator kGigabytes(
    [](std::string& text) {
      text = without_gigabytes(text);
      return std::string();
    },
    "");
const CLI::Validator kSinks(
    [](std::string& text) {
      static const std::regex sinks("((http|tensorboard|wandb|mlflow|prometheus)(:[^,]+)?(,(?!$)|$))+");
      return std::regex_match(text, sinks)
                 ? std::string()
                 : fmt::format("got {}; give http, tensorboard, wandb, mlflow or prometheus:FILE.prom", text);
    },
    "");
const CLI::Validator kLocalPath(
    [](std::string& text) {
      if (text.empty()) return std::string("the name is empty; leave the option out, or name a place");
      return is_store_address(text) ? fmt::format("\"{}\" {}", text, kStoreAdvice) : "";
    },
    "");
const CLI::Validator kPositive = number_that("be a positive number", "POSITIVE", [](double x) { return x > 0; });
const CLI::Validator kGpuMemory = number_that("be the GB of one GPU; --card takes the name of one", "POSITIVE",
                                              [](double x) { return x <= 2000; });
// More would be bytes that are taken for gigabytes.
const CLI::Validator kMemory =
    number_that("be a positive number of GB", "POSITIVE", [](double x) { return x > 0 && x <= 1e8; });

constexpr const char* kFooter =
    "\nExit codes: 0 done; 1 internal error (a bug); 2 bad input (config, data,\n"
    "checkpoint, command line); 3 loss, gradients or what is to be saved not finite;\n"
    "4 reading or writing failed (disk full, ...); 5 another rank died or hung;\n"
    "6 silent data corruption; 75 a signal stopped the run: the same command\n"
    "continues it.\n"
    "Documentation: README.md and docs/; of an installed program, share/doc/parka\n"
    "beside its bin.";

// An option whose value has a name of its own in the help, such as FILE. Empty: what CLI11 calls its type.
template <typename Value>
CLI::Option* add(CLI::App& command, const char* name, Value& value, const char* type, const char* help) {
  CLI::Option* option = command.add_option(name, value, help);
  return *type == '\0' ? option : option->type_name(type);
}

// One that may be repeated, with a value each time.
CLI::Option* add_repeated(CLI::App& command, const char* name, std::vector<std::string>& values, const char* type,
                          const char* help) {
  return add(command, name, values, type, help)->allow_extra_args(false);
}

// The configs of a command, and what overrides them.
struct GivenConfigs {
  std::vector<std::string> paths, overrides;
  std::string data;
};

constexpr const char* kEvalInterval = "training.eval_interval";

// The first config with all that overrides it: the others in their order, --data, --set.
template <typename... Options>
void give_configs(const GivenConfigs& given, Options&... options) {
  if (given.paths.empty()) return;
  config_file(given.paths.front());  // is named first where it is not there
  std::vector<std::string> overrides;
  const auto add = [&](const std::vector<std::string>& more) {
    overrides.insert(overrides.end(), more.begin(), more.end());
  };
  for (size_t i = 1; i < given.paths.size(); ++i) add(overrides_of(given.paths[i]));
  if (!given.data.empty()) {
    const bool says_when =
        is_overridden(overrides_of(given.paths.front()), kEvalInterval) || is_overridden(overrides, kEvalInterval);
    add(overrides_of_data(given.data, says_when ? 0 : 100));
  }
  add(given.overrides);
  ((options.config_path = given.paths.front(), options.overrides = overrides), ...);
}

void add_config_options(CLI::App& command, GivenConfigs& given) {
  add(command, "config", given.paths, "",
      "The run's JSON config, e.g. configs/quickstart.json, or a folder with its config.json; of several the later wins")
      ->required();
  add(command, "--data", given.data, "FOLDER",
      "Folder of `parka prepare`: sets the token files, their type and length, masks and documents");
  add_repeated(
      command, "--set", given.overrides, "KEY=VALUE",
      "Override a key of the config: --set optimizer.lr=1e-3, or --optimizer.lr=1e-3 for short (may be repeated)");
}

void add_checkpoint(CLI::App& command, std::string& path, const char* help) {
  command.add_option("checkpoint", path, help)->required();
}

void add_started_ranks(CLI::App& command, StartedRanks& started) {
  constexpr int kMost = 4096;
  CLI::Option& gpus = *command.add_option("--gpus", started.gpus, "Start one rank on each of N GPUs of this host");
  CLI::Option& ranks = *command.add_option("--ranks", started.ranks,
                                           "Start N ranks on this host, also on the CPU (docs/cluster.md)");
  for (CLI::Option* option : {&gpus, &ranks}) {
    option->type_name("N")->check(whole_number(1, kMost))->default_str("");  // without it: this process alone
  }
  gpus.excludes(&ranks);
}

void add_train(CLI::App& app, GivenConfigs& configs, TrainOptions& options) {
  CLI::App& command = *app.add_subcommand(
      "train", "Train a model. Resumes from the newest good checkpoint in checkpoint.folder if there is one.");
  add_config_options(command, configs);
  add_started_ranks(command, options.started);
  command.add_flag(
      "--must-be-new,--fresh", options.must_be_new,
      "Fail instead of resuming when checkpoint.folder already has checkpoints (--fresh: its old name)");
  add(command, "--follow", options.follow, "SINK,...",
      "Run `parka follow` beside it: http, tensorboard, wandb, mlflow or prometheus:FILE.prom")
      ->check(kSinks);
  command.add_flag(
      "--convert-states", options.convert_states,
      "Resume although the config has other formats of masters and moments (optimizer.states, master, ...) than the "
      "checkpoint, which are rounded to these");
}

// Options of what `plan` knows about links between GPUs; see docs/scaling.md.
void add_step_model(CLI::App& command, CLI::Option* measured, PlanOptions& options) {
  add(command, "--compare", options.compare_path, "FILE",
      "Such a measurement on --gpus GPUs, to compare the prediction with")
      ->needs(measured);
  add(command, "--nodes", options.nodes, "", "Number of nodes that the GPUs are in (default: 8 GPUs in each)")
      ->check(whole_number(1, int64_t{1} << 20))
      ->needs(measured)
      ->default_str("");
  const auto add_bandwidth = [&](const char* name, double& value, const char* help) {
    command.add_option(name, value, help)->check(kPositive)->needs(measured);
  };
  add_bandwidth("--link-bandwidth", options.link_bandwidth, "NCCL's bus bandwidth within a node, GB/s");
  add_bandwidth("--network-bandwidth", options.network_bandwidth, "Bandwidth from one GPU to other nodes, GB/s");
  add_bandwidth("--host-bandwidth", options.host_bandwidth,
                "Bandwidth between a GPU and its host's memory, GB/s in each direction");
}

void add_plan(CLI::App& app, GivenConfigs& configs, PlanOptions& options) {
  CLI::App& command = *app.add_subcommand(
      "plan",
      "Print the memory a run needs on each GPU and what would make it fit; with --measured, also predict its "
      "step time.");
  add_config_options(command, configs);
  add(command, "--gpus", options.num_gpus, "", "Number of GPUs")->check(whole_number(1, int64_t{1} << 20));
  const auto add_memory = [&](const char* name, auto& value, const char* help) {
    return add(command, name, value, "", help)->transform(kGigabytes)->check(kMemory);
  };
  CLI::Option* limit = add_memory("--memory-limit", options.memory_limit_gb,
                                  "Memory of one GPU in GB (1e9 bytes), or with a unit: 80GiB")
                           ->check(kGpuMemory);
  add(command, "--card", options.card, "",
      "Take the memory of this GPU, and tell by measurements that were made on it how long the run will take")
      ->check(CLI::IsMember(card_names()))
      ->excludes(limit);
  command.add_flag("--json", options.json, "Print JSON");
  add(command, "--write", options.write_path, "FILE",
      "Write the config to this file, with the cheapest changes that make it fit");
  CLI::Option* fit = command.add_flag(
      "--fit", options.fit,
      "Print only the cheapest changes with which the run fits, which keep every bit where that is enough, and its "
      "command");
  add_memory("--host-memory", options.host_memory_gb,
             "Memory of one host for all its GPUs, in GB or with a unit, of which a run leaves 2 GiB to all else "
             "(default: what is free on this host if it has the GPUs, otherwise unlimited)")
      ->needs(fit)
      ->default_str("");
  CLI::Option* measured = add(command, "--measured", options.measured_path, "FILE",
                              "Measurement on one GPU, written by `parka bench CONFIG --json FILE`");
  add_step_model(command, measured->excludes(fit), options);
}

void add_bench(CLI::App& app, GivenConfigs& configs, BenchOptions& options) {
  CLI::App& command = *app.add_subcommand(
      "bench", "Time training steps of a config on synthetic tokens: whole steps, every op, and per block.");
  add_config_options(command, configs);
  add_started_ranks(command, options.started);
  add(command, "--steps", options.steps, "", "Steps to time, after two warm-up steps")
      ->check(whole_number(1, int64_t{1} << 20));
  command.add_flag("--roofline", options.roofline,
                   "Also measure the least time this device could need for each op, and compare");
  add(command, "--json", options.json_path, "FILE", "Write all figures to this file");
}

void add_tune(CLI::App& app, GivenConfigs& configs, TuneOptions& options) {
  CLI::App& command = *app.add_subcommand(
      "tune", "Find the fastest algorithm for every matrix product of a config, for device.gemm_tuning.");
  add_config_options(command, configs);
  command.add_option("--output", options.output, "File to write")->type_name("FILE")->required();
  command.add_option("--candidates", options.candidates, "Algorithms to try for each product")
      ->check(whole_number(1, 1000));
  command.add_option("--seconds", options.seconds, "Time limit of the measurement, in seconds")
      ->check(CLI::Range(1.0, 1e5));
}

void add_tune_precision(CLI::App& app, GivenConfigs& configs, TunePrecisionOptions& options) {
  CLI::App& command = *app.add_subcommand(
      "tune-precision",
      "Find what to leave in bf16, so that FP8 costs checkpoint.init_from no more than a given loss.");
  add_config_options(command, configs);
  command.add_option("--write", options.write_path, "Config to write")->type_name("FILE")->required();
  command
      .add_option("--rise", options.rise_percent,
                  "Largest rise of the perplexity over that without FP8, in percent")
      ->transform(
          [](const std::string& text) { return text.ends_with('%') ? text.substr(0, text.size() - 1) : text; })
      ->check(CLI::Range(0.0, 100.0));
  add(command, "--sequences", options.sequences, "",
      "Sequences of data.eval to measure on, spread evenly over its files; without it of data.train; 0: all")
      ->check(kNotNegative);
}

void add_eval(CLI::App& app, EvalOptions& options) {
  CLI::App& command = *app.add_subcommand(
      "eval", "Evaluate a checkpoint: loss and perplexity on token files, and scores in multiple-choice tasks.");
  add_checkpoint(command, options.checkpoint, "A checkpoint, or a run folder (its newest checkpoint)");
  add(command, "--data", options.data, "",
      "Token files (without --data, --sets and --tasks: everything the config evaluates on)");
  add(command, "--sets", options.sets, "NAME=FILE", "Named sets of token files, each with its own loss");
  add(command, "--tasks", options.tasks, "FILE", "Request files of tasks, made by parka prepare-eval");
  add_repeated(command, "--set", options.overrides, "KEY=VALUE",
               "Override a key of the checkpoint's config, e.g. precision.eval=bf16");
  add(command, "--max-sequences", options.max_sequences, "",
      "Sequences to evaluate, spread evenly over the files of a set; 0: all")
      ->check(kNotNegative);
  add(command, "--max-documents", options.max_documents, "",
      "Documents of each task, spread evenly over it; 0: all")
      ->check(kNotNegative);
  add(command, "--predictions", options.predictions, "FILE",
      "Write the log-likelihood of every choice to this file");
  command.add_flag("--json", options.json, "Print JSON");
}

void add_generate(CLI::App& app, GenerateOptions& options) {
  CLI::App& command = *app.add_subcommand("generate", "Continue prompts with a checkpoint, or chat with it.");
  add_checkpoint(command, options.checkpoint, "A checkpoint, or a run folder (its newest checkpoint)");
  CLI::Option* prompt =
      add_repeated(command, "--prompt", options.prompts, "",
                   "Prompt text, by the model's tokenizer; if repeated, one line of JSON is printed for each");
  CLI::Option* prompt_tokens = add_repeated(command, "--prompt-tokens", options.prompt_tokens, "ID,ID,...",
                                            "Prompt as comma-separated token ids (may be repeated)");
  add(command, "--tokenizer", options.tokenizer, "FOLDER",
      "Folder with a tokenizer.json (default: the one kept with the run or the imported model)")
      ->excludes(prompt_tokens);
  CLI::Option* chat = command.add_flag("--chat", options.chat,
                                       "Chat by the model's template: each line of standard input is answered");
  chat->excludes(prompt)->excludes(prompt_tokens);
  CLI::Option* image =
      add_repeated(command, "--image", options.images, "FILE",
                   "Picture that the prompt shows where it has <image>, or else at its beginning; may be repeated");
  image->needs(prompt)->excludes(chat);
  add(command, "--geometry", options.geometry, "",
      "How pictures become squares: crop, pad or stretch (default: as the model's processor, or as usual "
      "with its tower)")
      ->check(CLI::IsMember({"crop", "pad", "stretch"}))
      ->needs(image);
  add(command, "--system", options.system, "TEXT", "System message of the chat")->needs(chat);
  add(command, "--tokens", options.num_tokens, "", "Maximum number of tokens to generate for each prompt")
      ->check(kNotNegative);
  SamplingOptions& sampling = options.sampling;
  add(command, "--temperature", sampling.temperature, "",
      "Divides the logits; 0 always takes the most likely token")
      ->check(kNotNegative);
  add(command, "--top-k", sampling.top_k, "", "Sample among the k most likely tokens; 0: all")->check(kNotNegative);
  add(command, "--top-p", sampling.top_p, "",
      "Sample among the most likely tokens whose total probability reaches this; 1: all")
      ->check(CLI::Range(0.0, 1.0));
  command.add_option("--seed", sampling.seed, "Seed of the sampling")->check(kSeed);
  add(command, "--stop-token", options.stop_tokens, "", "Stop before this token id (may be repeated)")
      ->allow_extra_args(false);
  add(command, "--batch", options.batch, "", "Prompts to continue at the same time")
      ->check(whole_number(1, int64_t{1} << 20))
      ->excludes(chat);
  command.add_flag("--json", options.json, "Print JSON once all prompts are done")->excludes(chat);
  add_repeated(command, "--set", options.overrides, "KEY=VALUE",
               "Override a key of the checkpoint's config, e.g. device.kind=cpu");
}

void add_import(CLI::App& app, ImportOptions& options) {
  CLI::App& command = *app.add_subcommand(
      "import",
      "Import a Hugging Face model (Llama, Mistral, Mixtral, Qwen, Gemma, OLMo, OLMoE, dots or LLaVA) as a checkpoint, to train, evaluate or sample from.");
  add(command, "folder", options.folder, "", "Folder with config.json and *.safetensors, or with peft's adapters")
      ->required();
  add(command, "--out", options.output, "FOLDER", "Folder to create")->required();
  add(command, "--finetune", options.finetune, "", "Write a config that fine-tunes with this method")
      ->check(CLI::IsMember({"lora", "qlora", "qst"}));
  add(command, "--base", options.base, "FOLDER",
      "Checkpoint, run folder or imported model that the adapters of folder belong to");
  add(command, "--vision-tower", options.vision_tower, "FOLDER",
      "Folder of a CLIP or SigLIP model, whose tower a Llama or Qwen2 gets with a new projector; or that of an "
      "original LLaVA");
  add(command, "--image-token", options.image_token, "",
      "Id of image slots with --vision-tower or VILA's folders (default: the first behind the vocabulary, which "
      "grows)")
      ->check(kNotNegative);
}

void add_export(CLI::App& app, ExportOptions& options) {
  CLI::App& command = *app.add_subcommand("export", "Export a checkpoint for Hugging Face transformers.");
  add_checkpoint(command, options.checkpoint,
                 "A checkpoint, a run folder (its newest checkpoint), or an imported model");
  add(command, "--out", options.output, "FOLDER", "Folder to create")->required();
  CLI::Option* dtype = add(command, "--dtype", options.dtype, "",
                           "Format of the weights (default: the imported model's, else the run's compute format)")
                           ->check(CLI::IsMember({"bf16", "fp16", "fp32"}));
  add(command, "--family", options.family, "NAME",
      "model_type of the export, such as llama or olmo2 (default: that of the model that the weights or --like come "
      "from, else the first that can express this model)");
  add(command, "--like", options.like, "FOLDER",
      "Hugging Face folder to copy the tokenizer and other settings from (default: the imported model that the weights "
      "come from)");
  add(command, "--base", options.base, "FOLDER",
      "Checkpoint or run folder that adapters or a side network were trained beside, where it has moved (default: "
      "where the run names it)");
  CLI::Option* shard_size = add(command, "--shard-size", options.shard_size, "SIZE",
                                "Largest size of a weight file, e.g. 5GB (default: 50GB)");
  command
      .add_flag(
          "--adapter", options.adapter,
          "Write what was trained beside the weights alone: adapters of finetune.method = lora, for peft, which "
          "else are added to the weights, or the side network of qst")
      ->excludes(dtype)
      ->excludes(shard_size);
}

void add_data(CLI::App& app, DataOptions& options) {
  CLI::App& command = *app.add_subcommand(
      "data",
      "Check token files by reading them whole: tokens, documents, range of ids, checksum. Refuses what "
      "training would refuse.");
  add(command, "inputs", options.inputs, "", "Token files or patterns; or a config, for the files it names")
      ->required();
  add(command, "--dtype", options.dtype, "", "Type of a token id in raw files (default: uint16)")
      ->check(CLI::IsMember({"uint16", "uint32"}));
  const auto add_id = [&](const char* name, auto& id, const char* help) {
    command.add_option(name, id, help)->check(kNotNegative)->default_str("");
  };
  add_id("--document-start", options.document_ids.start, "Token id that begins a document");
  add_id("--document-end", options.document_ids.end, "Token id that ends a document");
  add_repeated(command, "--set", options.overrides, "KEY=VALUE", "Override a key of the config");
  CLI::Option* show = add(command, "--show", options.show, "N",
                          "Print the text of the first N sequences, targets and documents marked, and no more");
  show->check(kPositive)->default_str("");
  add(command, "--tokenizer", options.tokenizer, "FOLDER",
      "Folder of the tokenizer for --show (default: data.tokenizer, or the one beside the files)")
      ->needs(show);
  command.add_flag("--json", options.json, "Print one line of JSON for each file")->excludes(show);
}

void add_config(CLI::App& app, GivenConfigs& configs, ConfigOptions& options) {
  CLI::App& command = *app.add_subcommand("config", "Check a config, print it resolved, or print all keys.");
  command.require_subcommand(1);
  using Action = ConfigOptions::Action;
  const auto add = [&](const char* name, const char* help, Action action, bool takes_config) {
    CLI::App& sub = *command.add_subcommand(name, help);
    if (takes_config) add_config_options(sub, configs);
    sub.callback([&options, action] { options.action = action; });
  };
  add("check", "Check a config, and the token files of it that are there", Action::kCheck, true);
  add("show", "Print a config with every key resolved", Action::kShow, true);
  add("schema", "Print the JSON Schema of config files", Action::kSchema, false);
  add("reference", "Print every key as a page in Markdown", Action::kReference, false);
}

void add_version(CLI::App& app, VersionOptions& options) {
  CLI::App& command = *app.add_subcommand("version", "Print the version.");
  command.add_flag(
      "--verbose", options.verbose,
      "Also print the commit, compiler, libraries, GPU architectures and this machine, for a bug report");
}

// Commands that are Python files in scripts/, which read their arguments themselves.
struct PythonCommand {
  const char *name, *script, *help;
};
constexpr PythonCommand kPythonCommands[] = {
    {"prepare", "prepare_data.py", "Turn text, records or conversations into token files."},
    {"prepare-images", "prepare_images.py", "Turn conversations about pictures into token and pixel files."},
    {"prepare-eval", "prepare_eval.py", "Turn a data set of questions (HellaSwag, ARC, ...) into a task."},
    {"tokenizer", "train_tokenizer.py", "Train a tokenizer on text."},
    {"follow", "follow.py", "Show a run in a browser, TensorBoard, Prometheus, W&B or MLflow."},
    {"plot", "plot.py", "Draw the curves of runs."},
    {"compare", "compare.py", "Compare the losses of runs."},
    {"scores", "task_scores.py", "Compare what runs answered in tasks."},
    {"config new", "new_config.py", "Write a config for a model, a number of tokens and a GPU"},
};

void add_python_commands(CLI::App& app) {
  for (const auto& [name, script, help] : kPythonCommands) {
    const std::string_view word = std::string_view(name).substr(std::string_view(name).find(' ') + 1);
    CLI::App& group = word == name ? app : *app.get_subcommand("config");
    group.add_subcommand(std::string(word), help)->callback([name = name] {
      throw_bad_input("command line: {}: has to stand right behind parka", name);
    });
  }
}

// Starts such a command if the first word is one.
void run_python_command(const std::vector<std::string>& arguments) {
  if (arguments.empty()) return;
  const std::ptrdiff_t words = arguments.front() == "config" && arguments.size() > 1 ? 2 : 1;
  const auto rest = arguments.begin() + words;
  const std::string given = fmt::format("{}", fmt::join(arguments.begin(), rest, " "));
  const auto* command = std::ranges::find(kPythonCommands, given, &PythonCommand::name);
  if (command != std::end(kPythonCommands))
    become_python("parka " + given, command->script, {rest, arguments.end()});
}

// Checks all options and arguments that are paths, which their type or their name says.
void check_paths(CLI::App& app) {
  constexpr std::string_view kTypes[] = {"FILE", "FOLDER", "NAME=FILE"},
                             kNames[] = {"config", "checkpoint", "folder", "inputs", "--data"};
  const auto is_one_of = [](const auto& list, const std::string& text) {
    return std::ranges::find(list, text) != std::end(list);
  };
  for (CLI::App* command : app.get_subcommands({})) {
    for (CLI::Option* option : command->get_options()) {
      if (is_one_of(kTypes, option->get_type_name()) || is_one_of(kNames, option->get_name()))
        option->check(kLocalPath);
    }
    check_paths(*command);
  }
}

// The values of all options and arguments.
struct CommandLine {
  int threads = 0;
  GivenConfigs configs;
  TrainOptions train;
  PlanOptions plan;
  EvalOptions eval;
  GenerateOptions generate;
  ImportOptions import_options;
  ExportOptions export_options;
  BenchOptions bench;
  TuneOptions tune;
  TunePrecisionOptions tune_precision;
  DataOptions data;
  ConfigOptions config;
  VersionOptions version;
};

void add_all(CLI::App& app, CommandLine& line) {
  app.formatter(make_help_formatter());
  app.option_defaults()->always_capture_default();
  app.set_version_flag("-V,--version", fmt::format("parka {}", parka_version()));
  app.require_subcommand(0, 1);  // with (1, 1) a misspelt command would be told only that one is required
  app.footer(kFooter);
  app.add_option("--threads", line.threads, "CPU threads, at most 4 for each core; 0: one for each core")
      ->check(whole_number(0, 4096));
  add_train(app, line.configs, line.train);
  add_plan(app, line.configs, line.plan);
  add_eval(app, line.eval);
  add_generate(app, line.generate);
  add_import(app, line.import_options);
  add_export(app, line.export_options);
  add_bench(app, line.configs, line.bench);
  add_tune(app, line.configs, line.tune);
  add_tune_precision(app, line.configs, line.tune_precision);
  add_data(app, line.data);
  add_config(app, line.configs, line.config);
  add_version(app, line.version);
  add_python_commands(app);
  check_paths(app);
}

int print_text(const std::string& text) {
  std::fputs(text.c_str(), stdout);
  return 0;
}

void warn_of_other_processes() {
  try {
    const LaunchedAs launched = launched_as([](const char* name) -> const char* { return std::getenv(name); });
    if (launched.size < 2) return;
    log_warning("{} counts {} processes, each of which does all of this command: start it once, without a launcher",
                launched.variable, launched.size);
  } catch (const Error& error) {  // about variables that only training needs
    log_warning("each process does all of this command: {}", error.what());
  }
}

int run_command(const CLI::App& app, const CommandLine& line) {
  if (!app.got_subcommand("train") && !app.got_subcommand("bench")) warn_of_other_processes();
  if (app.got_subcommand("train")) return run_train(line.train);
  if (app.got_subcommand("plan")) return line.plan.fit ? run_fit(line.plan) : run_plan(line.plan);
  if (app.got_subcommand("eval")) return run_eval(line.eval);
  if (app.got_subcommand("generate")) return run_generate(line.generate);
  if (app.got_subcommand("import")) return run_import(line.import_options);
  if (app.got_subcommand("export")) return run_export(line.export_options);
  if (app.got_subcommand("bench")) return run_bench(line.bench);
  if (app.got_subcommand("tune")) return run_tune(line.tune);
  if (app.got_subcommand("tune-precision")) return run_tune_precision(line.tune_precision);
  if (app.got_subcommand("data")) return run_data(line.data);
  if (app.got_subcommand("config")) return run_config(line.config);
  if (app.got_subcommand("version")) return print_text(version_text(line.version.verbose));
  print_text(app.help());
  return static_cast<int>(ExitCode::kBadInput);
}

int parse_and_run(int argc, char** argv) {
  const std::vector<std::string> arguments = expand_arguments({argv + 1, argv + argc});
  run_python_command(arguments);
  CLI::App app("Parka trains Llama- and OLMo-style language models with FP8 optimizer states and activations.",
               "parka");
  CommandLine line;
  add_all(app, line);
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));  // CLI11 takes the last one first
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success))
      return app.exit(error);  // --help, --version
    throw_bad_input("command line: {}", describe_parse_error(app, error, arguments));
  }
  set_num_threads(line.threads);
  give_configs(line.configs, line.train, line.plan, line.bench, line.tune, line.tune_precision, line.config);
  line.train.command_line = fmt::format("{}", fmt::join(argv, argv + argc, " "));
  return run_command(app, line);
}

// Printed text may still be on its way, to a file on a disk that is full.
void finish_output() {
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    throw_io("standard output: cannot be written; is the disk full?");
  }
}

}  // namespace

int run_command_line(int argc, char** argv) {
  // A write beyond `ulimit -f` shall fail like one on a full disk, with a message, not end the process.
  std::signal(SIGXFSZ, SIG_IGN);
  occupy_standard_streams();
  raise_open_file_limit();
  log_to_stderr(true);
  try {
    const int status = parse_and_run(argc, argv);
    finish_output();
    return status;
  } catch (const Error& error) {
    std::fprintf(stderr, "%sparka: error: %s\n", line_start().c_str(), as_line(error.what()).c_str());
    return static_cast<int>(error.code());
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "parka: error: out of memory; try a smaller training.micro_batch_size\n");
    return static_cast<int>(ExitCode::kBadInput);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "parka: internal error: %s\n", as_line(error.what()).c_str());
    return static_cast<int>(ExitCode::kInternal);
  }
}

}  // namespace parka
