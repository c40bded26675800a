#include "engine/commands/version.h"

namespace parka {

std::string parka_version() { return PARKA_VERSION; }

std::string parka_commit() { return PARKA_COMMIT; }

}  // namespace parka
