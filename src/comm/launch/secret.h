#pragma once
#include <string>

// A secret that the ranks of a run have in common, by which they know each other where others can reach their port.
// libsodium computes; no_sodium.cpp replaces it in builds without.
namespace parka {

// The environment variables that hold it, or name its file.
inline constexpr const char *kSecret = "PARKA_RENDEZVOUS_SECRET", *kSecretFile = "PARKA_RENDEZVOUS_SECRET_FILE";

// The secret of kSecret or of the file of kSecretFile, without the line's end; empty where neither is set. Throws
// Error(kBadInput), which names the variable, if both are set or misspelt, if the file cannot be read or the secret
// is too short, or if this build cannot use one.
std::string read_secret();

// A random word that no other exchange has.
std::string random_nonce();
// A proof that only the owner of the secret can make of `text`, and that does not tell the secret.
std::string proof_of(const std::string& secret, const std::string& text);
// Takes as long for proofs that are almost right.
bool is_proof(const std::string& given, const std::string& expected);

}  // namespace parka
