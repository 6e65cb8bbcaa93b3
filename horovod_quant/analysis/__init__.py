"""Error bounds and cost models."""
