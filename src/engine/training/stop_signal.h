#pragma once

namespace parka {

// From now on these signals end the process at once with ExitCode::kStopped: there is nothing to save yet.
void end_on_stop_signals();
// From now on SIGTERM, SIGUSR1, SIGHUP (unless it is ignored, as under nohup) and the first SIGINT ask the run to
// save and stop instead of ending the process. A broken output pipe does not end it either.
void catch_stop_signals();
// The signal that asked the run to stop, or 0.
int stop_signal();

}  // namespace parka
