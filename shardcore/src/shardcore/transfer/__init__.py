"""Other ways for activations to travel: in 8 bits, and in pieces beside products. Imports `shardcore.comm` alone."""
