"""From settings to ranks and their end: starting processes, signals, exit codes."""
