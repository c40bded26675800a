#include "core/error.h"

namespace parka {

void throw_unmet(const char* file, int line, const char* condition) {
  throw_internal("{}:{}: requires {}", file, line, condition);
}

}  // namespace parka
