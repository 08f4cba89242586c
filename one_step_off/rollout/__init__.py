"""The rollout side: vLLM replicas, the group that supervises them and routes prompts to them, partial rollouts.

Read `vllm_replica.py` first, then `replica_group.py`.
"""
