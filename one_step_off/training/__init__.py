"""The trainer's side: one worker class per role and back end (FSDP2, Megatron-core), LoRA, reward models.

Read `fsdp_workers.py` first; `megatron_workers.py` has the same methods.
"""
