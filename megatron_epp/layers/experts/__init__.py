"""What a layer of experts must know of the chunk that passes: which rows, how balanced so far."""
