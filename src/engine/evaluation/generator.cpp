#include "engine/evaluation/generator.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "core/error.h"
#include "core/philox.h"

namespace parka {
namespace {

// A prompt that is being continued in a slot of the cache.
struct Sequence {
  size_t prompt;
  int32_t slot;
  std::vector<int32_t> tokens;  // the prompt's, then those drawn
};

class Generation {
 public:
  Generation(Device& device, Model& model, const CacheShape& shape,
             const std::vector<std::vector<int32_t>>& prompts, const GenerationOptions& options,
             const TokenListener& listener)
      : device_(device),
        model_(model),
        max_length_(shape.max_length),
        prompts_(prompts),
        options_(options),
        listener_(listener),
        result_(prompts.size()) {
    for (int64_t slot = shape.num_slots; slot-- > 0;) free_slots_.push_back(static_cast<int32_t>(slot));
  }

  std::vector<Continuation> run() {
    if (options_.num_tokens < 1) return std::move(result_);
    while (!running_.empty() || next_prompt_ < prompts_.size()) {
      start_waiting();
      step();
    }
    return std::move(result_);
  }

 private:
  // Gives waiting prompts the free slots, and draws the first token of each.
  void start_waiting() {
    while (!free_slots_.empty() && next_prompt_ < prompts_.size()) {
      Sequence sequence{next_prompt_, free_slots_.back(), prompts_[next_prompt_]};
      PARKA_REQUIRE(!sequence.tokens.empty());
      free_slots_.pop_back();
      ++next_prompt_;
      if (draw(sequence, start(sequence))) running_.push_back(std::move(sequence));
    }
  }

  // Draws a token more of every running sequence.
  void step() {
    std::vector<Model::CachedToken> next;
    for (const Sequence& s : running_) {
      const auto length = static_cast<int32_t>(s.tokens.size());
      if (length <= max_length_) next.push_back({s.slot, length - 1, s.tokens.back()});
    }
    std::vector<float> logits;
    if (!next.empty()) logits = model_.decode(device_, next);
    const auto vocab = static_cast<int64_t>(logits.size() / std::max<size_t>(next.size(), 1));
    std::vector<Sequence> still_running;
    auto row = logits.cbegin();
    for (Sequence& s : running_) {
      std::vector<float> own;
      if (static_cast<int64_t>(s.tokens.size()) <= max_length_) {
        own.assign(row, row + vocab);
        row += vocab;
      } else {
        own = start(s);
      }
      if (draw(s, own)) still_running.push_back(std::move(s));
    }
    running_ = std::move(still_running);
  }

  // Fills the sequence's slot with as many of its latest tokens as there is room for.
  std::vector<float> start(const Sequence& s) {
    const int64_t count = std::min<int64_t>(max_length_, static_cast<int64_t>(s.tokens.size()));
    const std::vector<int32_t> positions = image_positions(static_cast<int64_t>(s.tokens.size()) - count);
    SequenceImages images;
    if (options_.images != nullptr) {
      images = {static_cast<int64_t>(options_.images->first_slots.size()), options_.images->pixels.data(),
                positions.data()};
    }
    return model_.prefill(device_, s.slot, {s.tokens.end() - count, s.tokens.end()}, images);
  }

  // The positions of the rows of the prompt's images, in a sequence without its first tokens.
  std::vector<int32_t> image_positions(int64_t without) const {
    std::vector<int32_t> positions;
    if (options_.images == nullptr) return positions;
    for (const int64_t first : options_.images->first_slots) {
      for (int64_t i = 0; i < options_.images->num_slots; ++i) {
        positions.push_back(static_cast<int32_t>(std::max<int64_t>(first + i - without, -1)));
      }
    }
    return positions;
  }

  // Returns true if the sequence continues after this token; its slot is free if not.
  bool draw(Sequence& s, const std::vector<float>& logits) {
    Continuation& continuation = result_[s.prompt];
    const int32_t token = sample_token(logits, options_.sampling, s.prompt, continuation.tokens.size());
    const std::vector<int32_t>& stop = options_.stop_tokens;
    continuation.stopped = std::ranges::find(stop, token) != stop.end();
    if (!continuation.stopped) {
      s.tokens.push_back(token);
      continuation.tokens.push_back(token);
      if (listener_) listener_(s.prompt, token);
      if (static_cast<int64_t>(continuation.tokens.size()) < options_.num_tokens) return true;
    }
    free_slots_.push_back(s.slot);
    return false;
  }

  Device& device_;
  Model& model_;
  int64_t max_length_;
  const std::vector<std::vector<int32_t>>& prompts_;
  const GenerationOptions& options_;
  const TokenListener& listener_;
  std::vector<Continuation> result_;
  std::vector<int32_t> free_slots_;
  std::vector<Sequence> running_;
  size_t next_prompt_ = 0;
};

// The tokens that may be drawn, most likely first, those of equal logits in their order.
std::vector<int32_t> most_likely(const std::vector<float>& logits, int64_t top_k) {
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto likelier = [&](int32_t a, int32_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  };
  const auto count = static_cast<int64_t>(order.size()), k = top_k > 0 ? std::min(top_k, count) : count;
  std::partial_sort(order.begin(), order.begin() + k, order.end(), likelier);
  order.resize(static_cast<size_t>(k));
  return order;
}

}  // namespace

std::vector<Continuation> generate(Device& device, Model& model, const CacheShape& shape,
                                   const std::vector<std::vector<int32_t>>& prompts,
                                   const GenerationOptions& options, const TokenListener& listener) {
  PARKA_REQUIRE(options.images == nullptr || prompts.size() == 1);
  return Generation(device, model, shape, prompts, options, listener).run();
}

int32_t sample_token(const std::vector<float>& logits, const SamplingOptions& options, uint64_t stream,
                     uint64_t index) {
  for (size_t i = 0; i < logits.size(); ++i) {
    if (!std::isfinite(logits[i])) {
      throw Error(ExitCode::kNonFinite,
                  fmt::format("the logit of token {} is {}: the checkpoint's weights are damaged or diverged", i,
                              logits[i]));
    }
  }
  if (options.temperature == 0) {
    return static_cast<int32_t>(std::ranges::max_element(logits) - logits.begin());
  }
  const std::vector<int32_t> order = most_likely(logits, options.top_k);
  std::vector<double> weight;
  double sum = 0;
  for (int32_t token : order) {
    weight.push_back(std::exp((static_cast<double>(logits[token]) - logits[order[0]]) / options.temperature));
    sum += weight.back();
  }
  if (options.top_p < 1) {
    double kept = 0;
    size_t count = 0;
    while (count < weight.size() && kept < options.top_p * sum) kept += weight[count++];
    weight.resize(std::max<size_t>(count, 1));
    sum = std::max(kept, weight[0]);
  }
  double rest = sum * uniform_open(philox4x32(static_cast<uint64_t>(options.seed), stream, index)[0]);
  for (size_t i = 0; i < weight.size(); ++i) {
    rest -= weight[i];
    if (rest <= 0) return order[i];
  }
  return order[weight.size() - 1];
}

}  // namespace parka
