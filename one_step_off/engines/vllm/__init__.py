"""vLLM as an engine of rollouts. Every import of vLLM is below this package."""
