"""Prompts and samples: the batch types that travel between processes, and the sources that prompts
come from.

Read `samples.py` first (`Prompt`, `Sample`, `Batch`), then `load_run_data` in `run_data.py`.
"""
