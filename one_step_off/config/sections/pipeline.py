"""The config section pipeline."""

from dataclasses import dataclass
from typing import Optional

from one_step_off.config.keys import config_key


@dataclass
class PipelineConfig:
    """The pipeline."""

    staleness: int = config_key(
        1,
        "k: a token that is trained is at most k versions old. 0: synchronous; 1: one step off "
        "(rollout and training overlap); more: longer responses delay training less",
        low=0,
        high=16,
    )
    partial_rollout: Optional[bool] = config_key(
        None,
        "the old name of weight_sync.in_flight=recompute with pipeline.staleness = 1 + max_carry",
    )
    max_carry: Optional[int] = config_key(
        None, "with partial_rollout: pipeline.staleness less 1", low=0, high=15
    )
