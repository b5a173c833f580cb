"""Engine hosting: the driver that clients share, and the thread or process that runs an engine."""
