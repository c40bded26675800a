#include "comm/launch/secret.h"

#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string_view>

#include <sodium.h>
#include <unistd.h>

#include "core/error.h"
#include "core/log/log.h"

namespace parka {
namespace {

constexpr size_t kFewestBytes = 16;     // others may try out proofs of short ones
constexpr size_t kMostBytes = 1 << 16;  // a file of secrets is small

template <size_t kBytes>
std::string to_hex(const std::array<unsigned char, kBytes>& bytes) {
  std::array<char, 2 * kBytes + 1> text{};
  sodium_bin2hex(text.data(), text.size(), bytes.data(), bytes.size());
  return text.data();
}

void require_sodium() {
  if (sodium_init() < 0) throw_internal("libsodium has no source of random numbers");
}

std::string read_file(const char* path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) {
    throw_bad_input("{}: {}: {}", kSecretFile, path, error ? error.message() : "is not a regular file");
  }
  if ((std::filesystem::status(path, error).permissions() & std::filesystem::perms(077)) !=
      std::filesystem::perms()) {
    log_warning("{}: {}: others on this host have access to it; chmod 600 it", kSecretFile, path);
  }
  std::string text(kMostBytes, '\0');
  std::ifstream file(path, std::ios::binary);
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (!file.is_open() || file.bad()) throw_bad_input("{}: {}: cannot be read", kSecretFile, path);
  text.resize(static_cast<size_t>(file.gcount()));
  return text;
}

std::string checked(std::string secret, const std::string& name) {
  const bool is_long = secret.size() >= kMostBytes;
  secret.resize(secret.find_last_not_of(" \t\r\n") + 1);
  if (secret.size() >= kFewestBytes && !is_long) return secret;
  throw_bad_input("{}: holds {} characters; a secret has from {} to {} (openssl rand -hex 32 makes one)", name,
                  is_long ? "more" : std::to_string(secret.size()), kFewestBytes, kMostBytes - 1);
}

void refuse_misspelt() {
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry, name = text.substr(0, text.find('='));
    const bool is_near = name.starts_with("PARKA_RENDEZVOUS") || name.starts_with("PARKA_SECRET");
    if (!is_near || name == kSecret || name == kSecretFile) continue;
    throw_bad_input("{}: unknown variable; the secret is {}, its file {}", name, kSecret, kSecretFile);
  }
}

}  // namespace

std::string read_secret() {
  refuse_misspelt();
  const char *const text = std::getenv(kSecret), *const path = std::getenv(kSecretFile);
  if (text != nullptr && path != nullptr)
    throw_bad_input("{} and {} are both set: unset one", kSecret, kSecretFile);
  std::error_code error;
  if (text != nullptr &&
      (*text == '/' || std::string_view(text).starts_with("~/") || std::filesystem::exists(text, error))) {
    throw_bad_input("{}: looks like the name of a file, which {} gives; set that instead", kSecret, kSecretFile);
  }
  if (text != nullptr) return checked(text, kSecret);
  return path == nullptr ? "" : checked(read_file(path), fmt::format("{}: {}", kSecretFile, path));
}

std::string random_nonce() {
  require_sodium();
  std::array<unsigned char, 16> bytes{};
  randombytes_buf(bytes.data(), bytes.size());
  return to_hex(bytes);
}

std::string proof_of(const std::string& secret, const std::string& text) {
  require_sodium();
  const auto bytes_of = [](const std::string& s) { return reinterpret_cast<const unsigned char*>(s.data()); };
  std::array<unsigned char, crypto_auth_KEYBYTES> key{};
  crypto_generichash(key.data(), key.size(), bytes_of(secret), secret.size(), nullptr, 0);
  std::array<unsigned char, crypto_auth_BYTES> proof{};
  crypto_auth(proof.data(), bytes_of(text), text.size(), key.data());
  return to_hex(proof);
}

bool is_proof(const std::string& given, const std::string& expected) {
  return given.size() == expected.size() && sodium_memcmp(given.data(), expected.data(), given.size()) == 0;
}

}  // namespace parka
