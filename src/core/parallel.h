#pragma once
#include <cstdint>
#include <functional>

namespace parka {

// Calls body(begin, end) over pieces of [0, count) on all worker threads and returns when all are done.
// Pieces are `grain` long (the last may be short) whatever the number of threads, so a result that
// depends on the piece boundaries is still the same on every machine. An exception in a piece is rethrown
// here, of several that of the first piece; pieces after it may or may not have run. Calls from inside a body that
// runs in parallel run inline.
void parallel_for(int64_t count, int64_t grain, const std::function<void(int64_t, int64_t)>& body);

// Number of threads that parallel_for uses: PARKA's --threads option, else the cores this process may use. Where
// the system does not allow as many, parallel_for warns once and uses those that there are.
int num_threads();
// Sets it, to at most 4 for each core; call before the first parallel_for. 0 means the default.
void set_num_threads(int count);

}  // namespace parka
