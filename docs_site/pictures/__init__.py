"""Pictures of the documentation: made by scripts, from the log of a real failure."""
