"""Where an engine runs: the driver that clients share, and the thread or process that hosts an engine."""
