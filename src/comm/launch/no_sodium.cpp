#include <cstdlib>

#include "comm/launch/secret.h"
#include "core/error.h"

// For builds without libsodium: read_secret() refuses, where one is set, so nothing calls the others.
namespace parka {

std::string read_secret() {
  const char* const set = std::getenv(kSecret) != nullptr ? kSecret : kSecretFile;
  if (std::getenv(set) == nullptr) return "";
  throw_bad_input(
      "{} is set, but this parka was built without libsodium: run scripts/setup.sh and build again, or unset it on a "
      "network that you trust (docs/cluster.md)",
      set);
}
std::string random_nonce() { throw_internal("random_nonce: built without libsodium"); }
std::string proof_of(const std::string&, const std::string&) {
  throw_internal("proof_of: built without libsodium");
}
bool is_proof(const std::string&, const std::string&) { throw_internal("is_proof: built without libsodium"); }

}  // namespace parka
