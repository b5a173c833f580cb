"""Process settings (threads, memory, Ctrl-C) and the doctor, which reports why a backend is missing."""
