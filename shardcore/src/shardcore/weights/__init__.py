"""Values that are told before there is room for them: recorded, or in files, and materialized in a sharded model."""
