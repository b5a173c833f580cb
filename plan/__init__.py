"""`headway plan`: how many GPUs of a kind a model needs, cut how, before any of them is bought or rented."""
