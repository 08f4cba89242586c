"""The trainer's side: one worker class per role and back end (FSDP2, Megatron-core), LoRA, reward
models.

Read `worker_interface.py` first, then `trained_worker.py`, the PPO update that every back end
shares.
"""
