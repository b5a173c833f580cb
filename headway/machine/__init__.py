"""How this process stands on its machine: threads, memory, Ctrl-C; and the doctor, who says why a backend is missing."""
