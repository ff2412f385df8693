"""Several ranks as one program: their links, calls on all ranks, and sharding of models."""
