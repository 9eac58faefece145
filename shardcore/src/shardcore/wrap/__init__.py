"""What goes around a sharded model: data parallelism."""
