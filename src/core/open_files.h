#pragma once

namespace parka {

// Lets this process open as many files as it may at most (ulimit -Hn), for itself and for commands that it starts.
void raise_open_file_limit();

// Opens what was closed of standard input, output and error, so that no file of this process becomes one of them.
// Reading and writing there fail as before.
void occupy_standard_streams();

}  // namespace parka
