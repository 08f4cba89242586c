"""Conversations of external agents with vLLM: its own renderers, parsers and protocols."""
