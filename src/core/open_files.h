#pragma once

namespace parka {

// Lets this process open as many files as it may at most (ulimit -Hn), for itself and for commands that it starts.
void raise_open_file_limit();

// Opens closed ones of standard input, output and error, lest a file become one. Using them fails as before.
void occupy_standard_streams();

}  // namespace parka
