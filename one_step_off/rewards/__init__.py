"""Rewards of responses: built-in verifiers, user functions, and the worker pool that enforces their time limits.

Read `Scorer` in `scoring.py` first.
"""
