"""The checks, one module per subject. `gpu_check/table.py` names their functions."""
