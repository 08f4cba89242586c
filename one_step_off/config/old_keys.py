"""Old names of config keys, which are replaced when a config is read.

The settings of a checkpoint are replaced in the same way, so that a run that was begun with the old
names resumes with the new ones.
"""

import sys
from typing import Any

from one_step_off.config.errors import key_error
from one_step_off.config.schema import Config

STALENESS = "pipeline.staleness"
IN_FLIGHT = "weight_sync.in_flight"
PARTIAL_ROLLOUT = "pipeline.partial_rollout"
MAX_CARRY = "pipeline.max_carry"

REMOVED_KEYS = {
    "weight_sync.receive_ahead": "weights travel while the replicas pause",
    "weight_sync.receive_ahead_mb": "weights travel while the replicas pause",
    "weight_sync.sender": "each rank sends its own shard",
    "weight_sync.canary_overlap": "the canary is scored before the next prompts",
}
"""Keys that do no longer exist -> what a run does."""

OLD_STALENESS = 1
OLD_MAX_CARRY = 1
OLD_OVERSAMPLE = 1.0


def replace_old_keys(cfg: Config) -> None:
    """Replace pipeline.partial_rollout and pipeline.max_carry by their new names, and print one
    line if that changes anything. A config without them stays as it is.

    Raises:
        ConfigError: they contradict pipeline.staleness or weight_sync.in_flight.
    """
    pipeline = cfg.pipeline
    partial_rollout = pipeline.partial_rollout
    max_carry = OLD_MAX_CARRY if pipeline.max_carry is None else pipeline.max_carry
    if not partial_rollout:
        pipeline.partial_rollout = None
        pipeline.max_carry = None
        return
    fix = f"remove it, and set {STALENESS} and {IN_FLIGHT}=recompute, its new names"
    if pipeline.staleness != OLD_STALENESS:
        raise key_error(cfg, PARTIAL_ROLLOUT, f"beside {STALENESS}={pipeline.staleness}; {fix}")
    if cfg.weight_sync.in_flight == "keep":
        raise key_error(cfg, PARTIAL_ROLLOUT, f"beside {IN_FLIGHT}=keep; {fix}")
    pipeline.partial_rollout = None
    pipeline.max_carry = None
    pipeline.staleness = OLD_STALENESS + max_carry
    cfg.weight_sync.in_flight = "recompute"
    if cfg.rollout.oversample is None:
        cfg.rollout.oversample = OLD_OVERSAMPLE
    print(
        f"warning: {PARTIAL_ROLLOUT}=true with {MAX_CARRY}={max_carry} is the old name of "
        f"{STALENESS}={pipeline.staleness} {IN_FLIGHT}=recompute "
        f"rollout.oversample={cfg.rollout.oversample:g}; these are used",
        file=sys.stderr,
    )


def replace_old_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings by dotted key that a checkpoint was made with, under their new names."""
    if PARTIAL_ROLLOUT not in settings:
        return settings
    replaced = dict(settings)
    partial_rollout = replaced.pop(PARTIAL_ROLLOUT)
    max_carry = replaced.pop(MAX_CARRY, OLD_MAX_CARRY)
    replaced[IN_FLIGHT] = "wait"
    if partial_rollout:
        replaced[IN_FLIGHT] = "recompute"
        replaced[STALENESS] = OLD_STALENESS + max_carry
    return replaced
