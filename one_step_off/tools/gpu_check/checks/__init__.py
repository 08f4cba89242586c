"""The checks, one module per subject. `tools/gpu_check/table.py` names their functions."""
