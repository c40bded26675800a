#pragma once

namespace parka {

// From now on SIGTERM, SIGUSR1, SIGHUP (unless it is ignored, as under nohup) and the first SIGINT ask the run to
// save and stop instead of ending the process. A broken output pipe does not end it either.
void catch_stop_signals();
// The signal that asked the run to stop, or 0.
int stop_signal();

}  // namespace parka
