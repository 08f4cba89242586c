"""The Megatron-Core back end."""
