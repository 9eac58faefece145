"""What goes around a sharded model: data parallelism, and the optimizer of its parameters."""
