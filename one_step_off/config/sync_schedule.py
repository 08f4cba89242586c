"""At which steps the replicas get new weights, which batches they then begin, and the checks of
`pipeline.staleness`, `weight_sync.in_flight` and what they need.

One inequality holds for every setting. With staleness k, and v the number of steps whose training
is in the weights that generate, a prompt may begin while

    prompts begun  <  (v + 1 + k) * prompts of a step

A step takes the prompts that are due first, so a token of version v is trained at step v + k at the
latest: no token is older than k versions.

With `weight_sync.in_flight=wait` no request is unfinished at a sync, so whole batches are begun,
and a sync comes when all of them are complete: every k steps. Then the k batches begin that the
inequality allows. For k = 3:

    step           0     1     2     3     4     5     6
    sync           v0                v3                v6
    begins         1-3               4-6               7-9
    trains on      v0    v0    v0    v0    v3    v3    v3

Batch 0 begins before step 0, with v0. With k = 0 batch N begins after the sync of step N.

With `recompute` and `keep` each step begins with a sync, and prompts begin one by one.
"""

from one_step_off.config.errors import key_error
from one_step_off.config.schema import Config


def waits_for_requests(cfg: Config) -> bool:
    """Whether no request may be unfinished at a sync, so that whole batches are generated."""
    return cfg.weight_sync.in_flight == "wait"


def sync_period(cfg: Config) -> int:
    """Steps from one sync to the next, counted from step 0."""
    if not waits_for_requests(cfg):
        return 1
    return max(1, cfg.pipeline.staleness)


def is_sync_step(cfg: Config, step: int) -> bool:
    """Whether the replicas get v(step) by the schedule."""
    return step % sync_period(cfg) == 0


def last_begun_batch(cfg: Config, step: int) -> int:
    """The newest batch of which prompts have begun after the sync of `step`, or after the last one
    before it. A pool may hold prompts of later ones too."""
    if not waits_for_requests(cfg):
        return step + 1
    staleness = cfg.pipeline.staleness
    if staleness == 0:
        return step
    return (step // staleness + 1) * staleness


def version_of_batch(cfg: Config, step: int) -> int:
    """The weights that make the batch of `step` where whole batches are generated, in a run that
    began at step 0."""
    staleness = cfg.pipeline.staleness
    if staleness == 0:
        return step
    return max(0, (step - 1) // staleness * staleness)


def prompts_allowed(cfg: Config, version: int) -> int:
    """How many prompts may have begun, counted from the start of the run, while `version`
    generates. The replicas may have room for fewer."""
    return (version + 1 + cfg.pipeline.staleness) * cfg.data.train_batch_size


def check_staleness(cfg: Config) -> None:
    """Raises ConfigError: the keys do not fit together."""
    _check_in_flight(cfg)
    _check_evaluated_versions(cfg)


def _check_in_flight(cfg: Config) -> None:
    if cfg.pipeline.staleness == 0 and not waits_for_requests(cfg):
        raise key_error(
            cfg,
            "weight_sync.in_flight",
            "unfinished requests become stale, which pipeline.staleness=0 forbids; "
            "set that to 1 or more, or this to wait",
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
