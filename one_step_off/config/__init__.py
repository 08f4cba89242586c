"""Configuration: the schema, loading with overrides, validation, and the hardware that a config is
resolved against.

Imports neither torch nor Ray. Read `sections/` first: its dataclasses are the documentation of
every key, and the checks of a section stand below it. `schema.py` puts the sections together.
"""
