"""Checks of `pipeline.staleness`, `weight_sync.in_flight` and what they need."""

from one_step_off.config.errors import key_error
from one_step_off.config.schema import Config
from one_step_off.config.sync_schedule import sync_period, waits_for_requests


def check_staleness(cfg: Config) -> None:
    """Raises ConfigError: the keys do not fit together."""
    _check_in_flight(cfg)
    _check_oversample(cfg)
    _check_evaluated_versions(cfg)


def _check_in_flight(cfg: Config) -> None:
    if cfg.pipeline.staleness == 0 and not waits_for_requests(cfg):
        raise key_error(
            cfg,
            "weight_sync.in_flight",
            "unfinished requests become stale, which pipeline.staleness=0 forbids; "
            "set that to 1 or more, or this to wait",
        )


def _check_oversample(cfg: Config) -> None:
    oversample = cfg.rollout.oversample
    staleness = cfg.pipeline.staleness
    if oversample is None:
        return
    if oversample > 1 and waits_for_requests(cfg):
        raise key_error(
            cfg,
            "rollout.oversample",
            "needs weight_sync.in_flight=recompute or keep; set that, or this to null",
        )
    if oversample > max(1, staleness):
        raise key_error(
            cfg,
            "rollout.oversample",
            f"more than pipeline.staleness={staleness} allows; use {staleness} at most, or null",
        )


def _check_evaluated_versions(cfg: Config) -> None:
    """`trainer.keep_best` looks for the evaluation of a checkpoint's own weights."""
    period = sync_period(cfg)
    if cfg.trainer.keep_best and cfg.trainer.test_freq % period:
        raise key_error(
            cfg,
            "trainer.test_freq",
            f"with pipeline.staleness={cfg.pipeline.staleness} the replicas get the weights of "
            f"every step divisible by {period}, and only these are evaluated; for "
            f"trainer.keep_best use a multiple of {period}",
        )
