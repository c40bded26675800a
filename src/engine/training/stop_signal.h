#pragma once

namespace parka {

// From now on SIGTERM, SIGUSR1, SIGHUP (unless it is ignored, as under nohup) and the first SIGINT ask the run to
// save and stop instead of ending the process, and a pipe that nobody reads any more does not end it.
void catch_stop_signals();
// The signal that asked, or 0.
int stop_signal();

}  // namespace parka
