"""The user's functions that `one_step_off.train` calls after each step.

def stop_early(step):                       # the step's row of metrics.jsonl, a dict
    if step["reward/mean"] > 0.9:
        raise StopTraining("the reward is above 0.9")

train(cfg, callbacks=[print, stop_early])
"""

from collections.abc import Callable, Sequence
from typing import Any

StepCallback = Callable[[dict[str, Any]], Any]


class StopTraining(Exception):
    """Raised by a callback: the run ends in good order at the beginning of the next step, with a
    checkpoint."""


class StepCallbacks:
    """Calls the callbacks of a run in their order.

    Attributes:
        stop_requested: whether a callback has raised StopTraining.
        stop_reason: what it said.
    """

    def __init__(self, callbacks: Sequence[StepCallback] = ()) -> None:
        self.callbacks = list(callbacks)
        self.stop_requested = False
        self.stop_reason = ""

    def step(self, row: dict[str, Any]) -> None:
        """Call all with a copy of the step's row of metrics. What a callback returns is ignored.

        Raises:
            Exception: what a callback raises, apart from StopTraining. It ends the run.
        """
        for callback in self.callbacks:
            try:
                callback(dict(row))
            except StopTraining as stop:
                self.stop_requested = True
                self.stop_reason = str(stop) or "a callback raised StopTraining"
