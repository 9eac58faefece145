"""The device mesh, what this rank is on it, and the random stream that a sharded model owns.

May import `shardcore.errors`.
"""
