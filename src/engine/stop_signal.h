#pragma once

namespace parka {

// From now on SIGTERM, SIGUSR1 and the first SIGINT ask the run to save and stop instead of ending the process.
void catch_stop_signals();
// The signal that asked, or 0.
int stop_signal();

}  // namespace parka
