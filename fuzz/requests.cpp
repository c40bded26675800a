#include "engine/evaluation/eval_requests.h"

#include "fuzz/target.h"

using namespace parka;
using namespace parka::fuzz;

// The requests of an evaluation task.
FUZZ_TARGET(requests) {
  constexpr int64_t kVocabSize = 1000, kSequenceLength = 16;
  test::write_file(folder() / "requests.jsonl", std::string(input));
  EvalTask task;
  if (!accepts([&] { task = read_requests(folder() / "requests.jsonl", kVocabSize, kSequenceLength); })) return;
  for (const TaskDocument& document : task.documents) {
    require(document.label >= 0 && document.label < static_cast<int64_t>(document.choices.size()), "no such label");
    for (const TaskChoice& choice : document.choices) {
      require(!choice.context.empty() && !choice.continuation.empty(), "a choice has no tokens");
      require(choice.continuation.size() <= kSequenceLength, "a continuation is longer than the context");
      require(choice.num_characters > 0 && choice.num_bytes > 0, "a continuation has no text");
      for (const auto* ids : {&choice.context, &choice.continuation, &choice.domain}) {
        for (const int32_t id : *ids) require(id >= 0 && id < kVocabSize, "a token is not in the vocabulary");
      }
    }
  }
}
