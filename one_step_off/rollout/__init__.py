"""The rollout side: replicas, their supervision and restart, the routing of prompts, and the
sources of batches.

Read `replica_group.RolloutGroup` first (the facade), then `replica.RolloutReplica` (one
engine), then `batch_sources` (how its samples become the batches of the training loop).
"""
