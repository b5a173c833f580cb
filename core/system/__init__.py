"""What Headway needs of the operating system: child processes with limits, files that appear whole, text made harmless."""
