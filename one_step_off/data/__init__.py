"""Prompts and samples: the batch types that travel between processes, and the sources that prompts come from.

Read `samples.py` first (`Prompt`, `Sample`, `Batch`), then `PromptStream` in `prompt_stream.py`.
"""
