#include "engine/commands/commands.h"

int main(int argc, char** argv) { return parka::run_command_line(argc, argv); }
