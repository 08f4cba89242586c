"""The machines of a run: placement groups, remote calls and waits with time limits, cleanup, usage.

Knows nothing of models. Read `placement.py` first, then `remote_calls.py` and `errors.py`.
"""
