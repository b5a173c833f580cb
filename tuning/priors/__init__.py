"""Tables of common layers on common GPUs, measured elsewhere: `headway.tuning.table.files` finds them."""
