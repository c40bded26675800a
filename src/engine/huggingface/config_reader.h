#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "core/error.h"
#include "engine/config/config_table.h"
#include "engine/files/json_text.h"
#include "engine/huggingface/huggingface_families.h"

namespace parka {

// Typed reads of an object's keys. A key that is null counts as absent, as in transformers.
class ConfigReader {
 public:
  ConfigReader(const json& object, std::string where) : object_(object), where_(std::move(where)) {}

  bool has(std::string_view key) const { return object_.contains(key); }
  const json* find(std::string_view key) const {
    const auto it = object_.find(key);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }
  int64_t integer(std::string_view key, std::optional<int64_t> otherwise = {}, int64_t least = 1) const {
    return read(key, otherwise, [&](const json& value) {
      const std::optional<int64_t> whole = exact_integer(value);
      if (!whole || *whole < least || *whole > kMaxDimension) {
        fail("{}: expected an integer from {} to {}, got {}", key, least, kMaxDimension, describe_json(value));
      }
      return *whole;
    });
  }
  double number(std::string_view key, std::optional<double> otherwise = {}) const {
    return read(key, otherwise, [&](const json& value) {
      if (!value.is_number()) fail("{}: expected a number, got {}", key, describe_json(value));
      return value.get<double>();
    });
  }
  bool flag(std::string_view key, std::optional<bool> otherwise = {}) const {
    return read(key, otherwise, [&](const json& value) {
      if (!value.is_boolean()) fail("{}: expected true or false, got {}", key, describe_json(value));
      return value.get<bool>();
    });
  }
  std::string text(std::string_view key, const std::string& otherwise) const {
    return read(key, std::optional(otherwise), [&](const json& value) {
      if (!value.is_string()) fail("{}: expected a string, got {}", key, describe_json(value));
      return value.get<std::string>();
    });
  }
  // Fails unless the key is absent or has the only value that is supported.
  void require(std::string_view key, const json& supported) const {
    const json* value = find(key);
    if (value == nullptr || *value == supported) return;
    fail("{} = {} is not supported; {} is", key, printable(value->dump()), supported.dump());
  }
  // The number of a hidden state, counted from the end where it is negative.
  int64_t hidden_state(std::string_view key, int64_t otherwise) const {
    constexpr int64_t kMost = 10000;
    const json* value = find(key);
    const std::optional<int64_t> whole = value == nullptr ? otherwise : exact_integer(*value);
    if (whole && -kMost <= *whole && *whole <= kMost) return *whole;
    fail("{} = {} is not supported; one number of a hidden state is", key, printable(value->dump()));
  }
  // Sets the key's field.
  void read(const IntegerKey& key, ModelConfig& model) const {
    const bool is_null = has(key.key) && find(key.key) == nullptr;
    const std::string_view name = find(key.key) == nullptr && find(key.alias) != nullptr ? key.alias : key.key;
    key.field.in(model) =
        is_null && key.of_null ? *key.of_null : integer(name, key.otherwise, key.may_be_zero ? 0 : 1);
  }
  void read(const RealKey& key, ModelConfig& model) const { key.field.in(model) = number(key.key, key.otherwise); }
  void read(const FlagKey& key, ModelConfig& model) const { key.field.in(model) = flag(key.key, key.otherwise); }

  template <typename... Args>
  [[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) const {
    throw_bad_input("{}: {}", where_, fmt::format(format, std::forward<Args>(args)...));
  }

 private:
  template <typename T, typename Parse>
  T read(std::string_view key, const std::optional<T>& otherwise, Parse parse) const {
    const json* value = find(key);
    if (value != nullptr) return parse(*value);
    if (!otherwise) fail("has no {}", key);
    return *otherwise;
  }

  const json& object_;
  std::string where_;
};

}  // namespace parka
