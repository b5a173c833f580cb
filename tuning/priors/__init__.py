"""Shipped tables (priors) of common layers on common GPUs, read by `headway.tuning.table.files`."""
