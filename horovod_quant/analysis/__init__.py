"""What `advise` computes: cost models and recommendations."""
