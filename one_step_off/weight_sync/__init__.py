"""The weight stream from trainer shards into the engine: bucket plan, sender, receiver, checks.

Read `weight_piece.py` (the contract between both sides), then `bucket_plan.py` (shards to buckets),
`sender.py`, `receiver.py`, `transports/transport.py` (how messages travel) and `coordinator.py`
(the driver).
"""
