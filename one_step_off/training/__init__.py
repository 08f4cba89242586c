"""Training: a worker class per role and back end (FSDP2, Megatron-core), LoRA, reward models.

Read `worker_interface.py` first, then `trained_worker.py`: the PPO update that both back ends
share. `trainer_group.py` is how the pipeline calls the ranks of a role.
"""
