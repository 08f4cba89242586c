"""The sections of a config, one file each: the keys with their types, defaults, bounds and help,
and the checks of what a section alone can show. Imports neither torch nor Ray nor vLLM."""
