"""The config section pipeline."""

from dataclasses import dataclass

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
    batch_source: str = config_key(
        "auto",
        "where the batches come from. auto: whole batches, or with weight_sync.in_flight = "
        "recompute or keep a pool of prompts; or module:Class of your own",
    )
