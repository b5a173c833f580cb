"""C of our own for a CPU: compiled by the machine's compiler at first use, kept on disk, on the threads of torch's OpenMP."""
