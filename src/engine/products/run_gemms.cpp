#include "engine/products/run_gemms.h"

#include <algorithm>
#include <cctype>
#include <map>
#include <set>

#include <source_dir.h>

#include "core/error.h"
#include "data/read_only_file.h"
#include "engine/files/file_io.h"
#include "engine/products/product_scratch.h"
#include "engine/training/progress.h"
#include "engine/training/run_records.h"

namespace parka {
namespace {

constexpr std::string_view kKeptName = "gemm_tuning.", kFileEnding = ".json";
constexpr const char* kFirstChoices = "cuBLASLt's first choices";

// "NVIDIA H200" -> "nvidia-h200"
std::string in_file_name(std::string text) {
  for (char& c : text) {
    const auto byte = static_cast<unsigned char>(c);
    c = std::isalnum(byte) != 0 || c == '.' ? static_cast<char>(std::tolower(byte)) : '-';
  }
  return text;
}

// Counts the GEMMs that cuBLASLt gets and the file has no algorithm for.
int64_t count_missing(const GemmTuningFile& file, const std::vector<RecordedProduct>& products) {
  std::set<std::string> there;
  for (const GemmChoice& choice : file.choices) there.insert(choice.gemm);
  return std::ranges::count_if(products, [&](const RecordedProduct& product) {
    return suits_cublaslt(product.gemm) && !there.contains(key_of(product.gemm));
  });
}

// A file of the run's folder that keeps algorithms for whatever GPU; empty: there is none.
std::string any_kept(const std::string& run_folder) {
  std::vector<std::string> names = list_names(run_folder);
  std::ranges::sort(names);
  const auto found = std::ranges::find_if(
      names, [](const std::string& name) { return name.starts_with(kKeptName) && name.ends_with(kFileEnding); });
  return found == names.end() ? "" : (fs::path(run_folder) / *found).string();
}

// The decisions of one run.
class Decision {
 public:
  Decision(const Config& config, Device& device, const RunGemmsOptions& options)
      : config_(config),
        device_(device),
        options_(options),
        kept_(kept_tuning_path(config.checkpoint.folder, device)),
        products_(record_products(config, options.num_ranks)) {}

  RunGemms make() const {
    if (config_.device.gemm_tuning_is_off()) return {};
    if (!config_.device.gemm_tuning_is_auto()) return use_given();
    if (file_exists(kept_)) {
      const GemmTuningFile file = load_kept();
      const int64_t missing = count_missing(file, products_);
      if (options_.has_checkpoint || missing == 0) return use_kept(missing);
    }
    if (!options_.has_checkpoint) return begin();
    const std::string& folder = config_.checkpoint.folder;
    const std::string other = any_kept(folder);
    const std::string gone = other.empty() ? read_history(folder + "/metrics.jsonl", 0).gemm_tuning : "";
    if (other.empty() && gone.empty()) return first_choices(", as when this run began");
    RunGemms gemms = begin();
    gemms.line += other.empty() ? fmt::format("; {}, which this run used, is gone", gone)
                                : fmt::format("; {} is for another GPU or cuBLASLt", other);
    gemms.line += ", so the bits are others from here on";
    return gemms;
  }

 private:
  static RunGemms first_choices(const std::string& why) {
    return {.line = fmt::format("GEMM algorithms: {}{}", kFirstChoices, why)};
  }

  GemmTuningFile load_kept() const {
    try {
      return load_gemm_tuning(kept_);
    } catch (const Error& error) {
      throw Error(error.code(),
                  fmt::format("{}; without it the run cannot go on with the same bits: restore it, or remove it to "
                              "have algorithms chosen anew",
                              error.what()));
    }
  }

  RunGemms use_kept(int64_t missing) const {
    RunGemms gemms = {.tuning = read_kept(), .source = kept_};
    gemms.line = fmt::format("GEMM algorithms: those of {}", kept_);
    if (missing > 0)
      gemms.line += fmt::format("; {} for {} of {} products", kFirstChoices, missing, products_.size());
    return gemms;
  }

  std::string read_kept() const { return file_exists(kept_) ? read_text(kept_, kLargestFile) : ""; }

  RunGemms keep(const std::string& text, const std::string& origin) const {
    const std::string before = read_kept();
    if (before != text) replace_file(kept_, text);
    const bool changes = options_.has_checkpoint && !before.empty() && before != text;
    return {.tuning = text,
            .source = kept_,
            .line = fmt::format("GEMM algorithms: {}; kept in {}{}", origin, kept_,
                                changes ? " in place of others, so the bits are others from here on" : "")};
  }

  RunGemms use_given() const {
    const std::string& path = config_.device.gemm_tuning;
    if (!file_exists(path)) return do_without(path);
    const std::string text = read_text(path, kLargestFile);
    require_for(parse_gemm_tuning(text, path), device_, path);
    return keep(text, fmt::format("those of {}", path));
  }

  // The run has its own copy of a file that it has used.
  RunGemms do_without(const std::string& path) const {
    if (!options_.has_checkpoint || !file_exists(kept_)) {
      throw_bad_input(
          "device.gemm_tuning: {}: no such file; name one that `parka tune` has written, or give auto, which finds one "
          "or makes it",
          path);
    }
    RunGemms gemms = use_kept(count_missing(load_kept(), products_));
    gemms.line += fmt::format("; {} is gone", path);
    return gemms;
  }

  // The choice of a run that has used no algorithms on this GPU.
  RunGemms begin() const {
    const std::string found = find_tuning(options_.tuning_folders, device_, products_, options_.warn);
    if (!found.empty()) return keep(read_text(found, kLargestFile), fmt::format("those of {}", found));
    const double of_steps = static_cast<double>(options_.steps) * seconds_of_products(device_, products_);
    RunGemms gemms = of_steps < kWorthTuningSeconds ? too_short(of_steps) : tune();
    gemms.ran_products = true;
    return gemms;
  }

  RunGemms too_short(double seconds) const {
    return first_choices(fmt::format("; the products of {} steps take {}, and tuning is for {} and more",
                                     options_.steps, format_duration(seconds),
                                     format_duration(kWorthTuningSeconds)));
  }

  RunGemms tune() const {
    const double begin = steady_seconds();
    const std::vector<GemmChoice> choices = options_.tune(products_);
    std::map<std::string, const GemmChoice*> by_key;
    for (const GemmChoice& choice : choices) by_key[choice.gemm] = &choice;
    double first = 0, chosen = 0;
    for (const RecordedProduct& product : products_) {
      const auto found = by_key.find(key_of(product.gemm));
      if (found == by_key.end()) continue;
      first += static_cast<double>(product.count) * found->second->default_microseconds;
      chosen += static_cast<double>(product.count) * found->second->microseconds;
    }
    const std::string line = fmt::format("tuned in {}, products take {:.1f} % less time than with {}",
                                         format_duration(steady_seconds() - begin),
                                         first > 0 ? 100 * (1 - chosen / first) : 0.0, kFirstChoices);
    return keep(gemm_tuning_text(choices, device_), line);
  }

  static constexpr int64_t kLargestFile = int64_t{64} << 20;

  const Config& config_;
  Device& device_;
  const RunGemmsOptions& options_;
  std::string kept_;
  std::vector<RecordedProduct> products_;
};

}  // namespace

std::vector<std::string> tuning_folders(const std::string& config_path) {
  std::error_code ignored;
  const fs::path program = fs::read_symlink("/proc/self/exe", ignored);
  const fs::path installed = program.parent_path().parent_path() / "share/parka/configs/tuning";
  return {(fs::path(config_path).parent_path() / "tuning").string(), installed.string(),
          (fs::path(PARKA_SOURCE_DIR) / "configs/tuning").string()};
}

std::string kept_tuning_path(const std::string& run_folder, const Device& device) {
  const std::string name = fmt::format("{}{}.{}{}", kKeptName, in_file_name(device.name()),
                                       in_file_name(gemm_library_version()), kFileEnding);
  return (fs::path(run_folder) / name).string();
}

std::string find_tuning(const std::vector<std::string>& folders, const Device& device,
                        const std::vector<RecordedProduct>& products,
                        const std::function<void(const std::string&)>& warn) {
  for (const std::string& folder : folders) {
    std::vector<std::string> names = list_names(folder);
    std::ranges::sort(names);
    for (const std::string& name : names) {
      if (!name.ends_with(kFileEnding)) continue;
      const std::string path = (fs::path(folder) / name).string();
      try {
        const GemmTuningFile file = load_gemm_tuning(path);
        if (file.is_for(device) && count_missing(file, products) == 0) return path;
      } catch (const Error& error) {
        warn(error.what());
      }
    }
  }
  return "";
}

RunGemms decide_run_gemms(const Config& config, Device& device, const RunGemmsOptions& options) {
  return Decision(config, device, options).make();
}

}  // namespace parka
