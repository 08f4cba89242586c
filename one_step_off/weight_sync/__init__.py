"""The weight stream from trainer shards into vLLM: bucket plan, sender, receiver, deltas, checks.

Read `weight_piece.py` (the contract between both sides), then `bucket_plan.py` (shards to buckets),
`sender.py`, `receiver.py`, `vllm_receiver.py` (weights into vLLM) and `coordinator.py` (the
driver).
"""
