"""The reference engine: transformers' `generate` in the replica's own process."""
