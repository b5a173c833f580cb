"""Our C for CPUs: compiled once per machine, called by ctypes."""
