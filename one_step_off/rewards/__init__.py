"""Rewards of responses: built-in verifiers, user functions, and workers that enforce their time
limits.

Read `Scorer` in `scoring.py` first; a new built-in reward is one function in `verifiers.py`. Reward
functions and agent loops of users import `Reward` from here.
"""

from one_step_off.rewards.reward import Reward, RewardError, RewardItem

__all__ = ["Reward", "RewardError", "RewardItem"]
