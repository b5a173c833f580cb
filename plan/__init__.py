"""`headway plan`: number of GPUs and parallel layout that a model needs, predicted before any GPU is bought or rented."""
