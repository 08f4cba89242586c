"""A response to score."""

from __future__ import annotations

from one_step_off.rewards.reward import RewardItem


def item(response: str = "#### 1", truth: str = "1", prompt: str = "p", n: int = 0) -> RewardItem:
    """A response to score."""
    return RewardItem(
        prompt_id=(2, 17), index=n, prompt=prompt, response=response, ground_truth=truth
    )
