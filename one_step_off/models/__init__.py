"""Models: the tiny ones of the CPU run, Hugging Face models as the roles need them, reading of untrusted pickles.

Read `hf_model.py` first.
"""
