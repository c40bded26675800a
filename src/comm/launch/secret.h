#pragma once
#include <string>

// A secret that the ranks of a run have in common, by which they know each other where others can reach their port.
// libsodium computes; no_sodium.cpp replaces it in builds without.
namespace parka {

// The environment variable that names its file.
inline constexpr const char* kSecretFile = "PARKA_RENDEZVOUS_SECRET_FILE";

// The contents of that file, without the line's end. Throws Error(kBadInput), which names it, if it cannot be read
// or holds too little, or if this build cannot use it.
std::string read_secret(const std::string& path);

// A random word that no other exchange has.
std::string random_nonce();
// A proof that only the owner of the secret can make of `text`, and that does not tell the secret.
std::string proof_of(const std::string& secret, const std::string& text);
// Takes as long for proofs that are almost right.
bool is_proof(const std::string& given, const std::string& expected);

}  // namespace parka
