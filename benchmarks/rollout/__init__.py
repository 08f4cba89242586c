"""The rollout against the bare vLLM engine: tokens per second, and microseconds per token of each
part of the host's work.
"""
