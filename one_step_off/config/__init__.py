"""Configuration: the schema, loading with overrides, validation, and the hardware that a config is
resolved against.

Imports neither torch nor Ray. Read `schema.py` first: its dataclasses are the documentation of
every key.
"""
