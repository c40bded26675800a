#pragma once
#include <functional>
#include <string>
#include <string_view>

namespace parka::test {

// Runs `target` on the files of fuzz/seeds/<name> and on some hundred damaged copies of them, the same ones every
// time: bits flipped, parts cut out, doubled and mixed, numbers replaced by huge, negative and broken ones. Fails
// the test case for whatever the target throws, and for a single allocation of more than 64 MiB; the input is then
// left in the folder for temporary files.
void run_on_damaged_seeds(const std::string& name, const std::function<void(std::string_view input)>& target);

}  // namespace parka::test
