"""Any decoder of transformers that calls its attention through transformers' attention interface, on Headway's paged cache."""
