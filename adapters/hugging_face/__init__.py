"""What transformers saves."""
