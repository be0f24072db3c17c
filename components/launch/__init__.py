"""Starts and ends the ranks of a node: settings, processes, signals, exit codes."""
