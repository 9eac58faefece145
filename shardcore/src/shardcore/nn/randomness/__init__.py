"""The model's random stream, and who draws from it."""
