#include "engine/config/config_table.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "engine/files/json_text.h"

namespace parka {
namespace {

template <typename... Handlers>
struct Overloaded : Handlers... {
  using Handlers::operator()...;
};
template <typename... Handlers>
Overloaded(Handlers...) -> Overloaded<Handlers...>;

// The visitor that the config structs call for each of their fields.
class TableBuilder {
 public:
  TableBuilder(ConfigTable& table, std::string prefix) : table_(table), prefix_(std::move(prefix)) {}

  template <typename Section>
  requires requires(Section& section, TableBuilder& builder) { section.fields(builder); }
  void operator()(const char* key, Section& section, const char* help) {
    table_.sections.push_back({prefix_ + key, help});
    TableBuilder nested(table_, prefix_ + key + ".");
    section.fields(nested);
  }
  void operator()(const char* key, bool& value, const char* help, Effects effects) {
    add(key, help, effects, BooleanField{&value});
  }
  void operator()(const char* key, int64_t& value, const char* help, IntegerRange range, Effects effects) {
    add(key, help, effects, IntegerField{&value, range, {}});
  }
  template <size_t N>
  void operator()(const char* key, int64_t& value, const char* help, const OneOf<int64_t, N>& limit,
                  Effects effects) {
    const auto [low, high] = std::ranges::minmax_element(limit.values);
    add(key, help, effects, IntegerField{&value, {*low, *high}, {limit.values.begin(), limit.values.end()}});
  }
  void operator()(const char* key, double& value, const char* help, RealRange range, Effects effects) {
    add(key, help, effects, RealField{&value, range});
  }
  void operator()(const char* key, std::string& value, const char* help, Effects effects) {
    add(key, help, effects, TextField{&value});
  }
  void operator()(const char* key, std::string& value, const char* help, MayBeEmpty, Effects effects) {
    add(key, help, effects, TextField{&value, true});
  }
  void operator()(const char* key, std::vector<std::string>& value, const char* help, Effects effects) {
    add(key, help, effects, TextListField{&value});
  }
  void operator()(const char* key, std::vector<double>& value, const char* help, RealRange range, Effects effects) {
    add(key, help, effects, RealListField{&value, range});
  }
  template <NamedEnum E>
  void operator()(const char* key, E& value, const char* help, Effects effects) {
    EnumField field{bytes_of(value), {}};
    for (const auto& [choice, name] : EnumNames<E>::kAll) {
      field.choices.push_back({static_cast<uint8_t>(choice), name});
    }
    add(key, help, effects, std::move(field));
  }
  template <size_t N>
  void operator()(const char* key, DType& value, const char* help, const OneOf<DType, N>& limit, Effects effects) {
    EnumField field{bytes_of(value), {}};
    for (const DType choice : limit.values)
      field.choices.push_back({static_cast<uint8_t>(choice), name_of(choice)});
    add(key, help, effects, std::move(field));
  }

 private:
  template <typename E>
  static uint8_t* bytes_of(E& value) {
    static_assert(sizeof(E) == 1, "config enums are uint8_t");
    return reinterpret_cast<uint8_t*>(&value);
  }
  template <typename Target>
  void add(const char* key, const char* help, Effects effects, Target target) {
    table_.fields.push_back({prefix_ + key, help, effects, std::move(target)});
  }

  ConfigTable& table_;
  std::string prefix_;
};

std::string wrong_type(std::string_view expected, const json& value) {
  return fmt::format("expected {}, got {}", expected, describe_json(value));
}

std::string limit_problem(int64_t value, const IntegerField& field) {
  if (!field.choices.empty()) {
    if (std::ranges::find(field.choices, value) != field.choices.end()) return {};
    return fmt::format("{} is not valid; allowed: {}", value, fmt::join(field.choices, ", "));
  }
  if (value >= field.range.min && value <= field.range.max) return {};
  return fmt::format("{} is out of range; allowed: {} to {}", value, field.range.min, field.range.max);
}

// Nearer to 0 than this a number would be 0, or lose its precision, as the fp32 number that it becomes.
std::string limit_problem(double value, const RealRange& range) {
  if (value != 0 && std::abs(value) < double{std::numeric_limits<float>::min()}) {
    return fmt::format("{} is too close to 0 for a 32-bit float; give 0 or at least {:.3g}", value,
                       std::numeric_limits<float>::min());
  }
  if (value >= range.min && (range.max_excluded ? value < range.max : value <= range.max)) return {};
  return fmt::format("{} is out of range; allowed: {} {} {}", value, range.min,
                     range.max_excluded ? "to below" : "to", range.max);
}

std::string limit_problem(const std::string& value) {
  if (value.empty()) return "must not be empty";
  if (std::ranges::any_of(value, is_control))
    return fmt::format("control characters are not allowed: \"{}\"", printable(value));
  if (!is_utf8(value)) return fmt::format("not valid UTF-8: \"{}\"", printable(value));
  return {};
}

std::string set_integer(const IntegerField& field, const json& value) {
  if (!value.is_number()) return wrong_type("an integer", value);
  const std::optional<int64_t> number = exact_integer(value);
  if (!number) return wrong_type("an integer", value);
  const std::string problem = limit_problem(*number, field);
  if (problem.empty()) *field.value = *number;
  return problem;
}

// Reads one value into `number` or `text`, unless the result is a problem.
std::string set_real(double& number, RealRange range, const json& value) {
  if (!value.is_number()) return wrong_type("a number", value);
  const std::string problem = limit_problem(value.get<double>(), range);
  if (problem.empty()) number = value.get<double>();
  return problem;
}

std::string set_text(std::string& text, bool may_be_empty, const json& value) {
  if (!value.is_string()) return wrong_type("a string", value);
  const auto& given = value.get_ref<const std::string&>();
  const std::string problem = given.empty() && may_be_empty ? "" : limit_problem(given);
  if (problem.empty()) text = given;
  return problem;
}

template <typename Element, typename Set>
std::string set_list(std::vector<Element>& list, const json& value, Set set) {
  std::vector<Element> elements(value.size());
  for (size_t i = 0; i < value.size(); ++i) {
    if (const std::string problem = set(elements[i], value[i]); !problem.empty()) {
      return fmt::format("entry {}: {}", i, problem);
    }
  }
  list = std::move(elements);
  return {};
}

std::string set_real_list(const RealListField& field, const json& value) {
  if (!value.is_array()) return wrong_type("an array of numbers", value);
  return set_list(*field.value, value,
                  [&](double& number, const json& one) { return set_real(number, field.range, one); });
}

std::string set_text_list(const TextListField& field, const json& value) {
  if (value.is_string()) {
    const bool is_unquoted = value.get_ref<const std::string&>().starts_with('[');
    return fmt::format(
        "expected an array of strings, got {}; {}", describe_json(value),
        is_unquoted ? "quote it for the shell, as in --set 'KEY=[\"TEXT\"]'" : "write it in square brackets");
  }
  if (!value.is_array()) return wrong_type("an array of strings", value);
  return set_list(*field.value, value,
                  [](std::string& text, const json& one) { return set_text(text, false, one); });
}

std::string set_enum(const EnumField& field, const json& value) {
  const std::string allowed = fmt::format("\"{}\"", fmt::join(field.names(), "\", \""));
  if (!value.is_string()) return fmt::format("{}; allowed: {}", wrong_type("a string", value), allowed);
  const auto& text = value.get_ref<const std::string&>();
  for (const auto& choice : field.choices) {
    if (choice.name != text) continue;
    *field.value = choice.value;
    return {};
  }
  const std::string nearest = nearest_name(text, field.names());
  const std::string advice = nearest.empty() ? "allowed" : fmt::format("did you mean \"{}\"? Allowed", nearest);
  return fmt::format("\"{}\" is not valid; {}: {}", printable(text), advice, allowed);
}

}  // namespace

std::vector<std::string> EnumField::names() const {
  std::vector<std::string> names;
  for (const Choice& choice : choices) names.emplace_back(choice.name);
  return names;
}

const ConfigField* ConfigTable::find(std::string_view path) const {
  for (const ConfigField& field : fields) {
    if (field.path == path) return &field;
  }
  return nullptr;
}

bool ConfigTable::has_section(std::string_view path) const {
  return std::ranges::any_of(sections, [&](const ConfigSection& section) { return section.path == path; });
}

ConfigTable make_config_table(Config& config) {
  ConfigTable table;
  TableBuilder builder(table, "");
  config.fields(builder);
  return table;
}

std::string set_field(const ConfigField& field, const json& value) {
  return std::visit(Overloaded{
                        [&](const BooleanField& f) {
                          if (!value.is_boolean()) return wrong_type("true or false", value);
                          *f.value = value.get<bool>();
                          return std::string();
                        },
                        [&](const IntegerField& f) { return set_integer(f, value); },
                        [&](const RealField& f) { return set_real(*f.value, f.range, value); },
                        [&](const TextField& f) { return set_text(*f.value, f.may_be_empty, value); },
                        [&](const TextListField& f) { return set_text_list(f, value); },
                        [&](const RealListField& f) { return set_real_list(f, value); },
                        [&](const EnumField& f) { return set_enum(f, value); },
                    },
                    field.target);
}

ordered_json get_field(const ConfigField& field) {
  return std::visit(Overloaded{
                        [](const EnumField& f) {
                          for (const auto& choice : f.choices) {
                            if (choice.value == *f.value) return ordered_json(choice.name);
                          }
                          throw_internal("{} is not a value of its enum", *f.value);
                        },
                        [](const auto& f) { return ordered_json(*f.value); },
                    },
                    field.target);
}

std::string_view section_of(std::string_view path) {
  const size_t dot = path.rfind('.');
  return dot == std::string_view::npos ? std::string_view() : path.substr(0, dot);
}

std::string_view key_of(std::string_view path) { return path.substr(path.rfind('.') + 1); }

std::optional<int64_t> exact_integer(const json& value) {
  if (value.is_number_unsigned()) {
    const auto number = value.get<uint64_t>();
    if (number > static_cast<uint64_t>(INT64_MAX)) return std::nullopt;
    return static_cast<int64_t>(number);
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  if (!value.is_number()) return std::nullopt;
  const auto number = value.get<double>();
  if (!(std::abs(number) <= static_cast<double>(kMaxExactInteger)) || number != std::trunc(number))
    return std::nullopt;
  return static_cast<int64_t>(number);
}

std::string describe_json(const json& value) {
  switch (value.type()) {
    case json::value_t::null: return "null";
    case json::value_t::object: return "an object";
    case json::value_t::array: return "an array";
    case json::value_t::string:
      return fmt::format("a string \"{}\"", printable(value.get_ref<const std::string&>()));
    case json::value_t::boolean: return value.get<bool>() ? "true" : "false";
    case json::value_t::number_integer: return fmt::format("{}", value.get<int64_t>());
    case json::value_t::number_unsigned: return fmt::format("{}", value.get<uint64_t>());
    case json::value_t::number_float: return value.dump();  // 16.0 is not shown as 16
    case json::value_t::binary: return "binary data";
    case json::value_t::discarded: return "nothing";
  }
  return "an unknown value";
}

// Optimal string alignment: cost[i][j] is the distance between the first i letters of a and the first j of b.
int edit_distance(std::string_view a, std::string_view b) {
  constexpr size_t kLongest = 64;
  a = a.substr(0, kLongest);
  b = b.substr(0, kLongest);
  std::vector<std::vector<int>> cost(a.size() + 1, std::vector<int>(b.size() + 1));
  for (size_t i = 0; i <= a.size(); ++i) cost[i][0] = static_cast<int>(i);
  for (size_t j = 0; j <= b.size(); ++j) cost[0][j] = static_cast<int>(j);
  for (size_t i = 1; i <= a.size(); ++i) {
    for (size_t j = 1; j <= b.size(); ++j) {
      const int replaced = cost[i - 1][j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      cost[i][j] = std::min({replaced, cost[i - 1][j] + 1, cost[i][j - 1] + 1});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        cost[i][j] = std::min(cost[i][j], cost[i - 2][j - 2] + 1);
      }
    }
  }
  return cost[a.size()][b.size()];
}

int name_distance(std::string_view given, std::string_view name) {
  constexpr size_t kWord = 4;  // shorter names are in too many others
  const bool is_part = (given.size() >= 2 && name.find(given) != std::string_view::npos) ||
                       (name.size() >= kWord && given.find(name) != std::string_view::npos);
  return is_part && given != name ? 1 : edit_distance(given, name);
}

int plausible_distance(std::string_view given) {
  return 1 + static_cast<int>(std::min<size_t>(given.size(), 64) / 4);
}

std::string nearest_name(std::string_view given, const std::vector<std::string>& names) {
  std::string nearest;
  int smallest = plausible_distance(given) + 1;
  for (const std::string& name : names) {
    const int distance = name_distance(given, name);
    if (distance >= smallest) continue;
    smallest = distance;
    nearest = name;
  }
  return nearest;
}

}  // namespace parka
