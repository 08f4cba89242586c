"""Models: the tiny ones of the CPU run, checks of a model's files, and reading of pickles that cannot run code.

Read `tiny_qwen.py` first.
"""
