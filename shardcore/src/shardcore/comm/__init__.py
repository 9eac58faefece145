"""Channels, and collectives on them as forward/backward pairs. Imports nothing above it, `shardcore.mesh` included."""
