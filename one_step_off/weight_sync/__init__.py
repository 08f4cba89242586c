"""The weight stream from trainer shards into vLLM: bucket plan, sender, receiver, deltas, verification.

Read `weight_piece.py` (the contract between both sides), then `bucket_plan.py` and `coordinator.py`.
"""
