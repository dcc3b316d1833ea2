"""The daemon as a process of its machine: its log, its priority, and the deaths of its clients."""
