"""The trainer back ends by name: what `actor.backend` and its likes mean.

A back end is a table of worker classes, role -> class, each with the methods of its role in
`worker_interface.py`. The role "supervised" is the actor of `main_sft`. A user's own back end is
named as `module:TABLE`.
"""

from collections.abc import Mapping
from typing import Any

from one_step_off.config.errors import ConfigError
from one_step_off.config.registry import BACK_ENDS, import_object


def worker_class(key: str, back_end: str, role: str) -> Any:
    """The class of a role's workers in a back end.

    Args:
        key: the config key that names the back end, as "actor.backend".
        back_end: a name of `BACK_ENDS`, or `module:TABLE`.
        role: a role with a model, or "supervised".

    Raises:
        ConfigError: there is no such table, or it has no such role.
    """
    workers: Any = import_object(key, BACK_ENDS.get(back_end, back_end))
    if not isinstance(workers, Mapping):
        raise ConfigError(
            f"{key}={back_end!r}: is no dict of worker classes by role; name one, such as "
            "one_step_off.training.fsdp.fsdp_workers:WORKERS"
        )
    if role not in workers:
        raise ConfigError(
            f"{key}={back_end!r}: has no worker for the role {role}, only {', '.join(workers)}; "
            "add one, or use fsdp"
        )
    return workers[role]
