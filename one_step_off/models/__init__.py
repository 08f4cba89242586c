"""Models: Hugging Face models as the roles need them, checks of their files, tiny models for CPUs.

Read `hf_model.py` first; `tiny_qwen.py` makes the model of the CPU run.
"""
