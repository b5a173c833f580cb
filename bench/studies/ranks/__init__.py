"""Several ranks on the devices that are here: the tokens of one, ends that are clean, and how fast, beside what was predicted."""
