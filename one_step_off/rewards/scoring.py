"""The reward worker: scores finished responses, each within the time limit `reward.timeout_s`.

`reward.workers` processes each run one `Scorer`; the replicas send them responses.
"""

import importlib
import logging
import time
from collections.abc import Mapping
from typing import Any

from one_step_off.config.schema import RewardConfig
from one_step_off.config.user_code import (
    MAX_MESSAGE_CHARS,
    describe_error,
    find_user_line,
    format_traceback,
    log_traceback,
    quote_response,
)
from one_step_off.rewards.functions import RewardFunction, RewardFunctions
from one_step_off.rewards.reward import (
    TIMEOUT,
    Reward,
    RewardError,
    RewardItem,
    Score,
    to_score,
)
from one_step_off.rewards.time_limit import (
    TimeUp,
    alarm_handler,
    start_time_limit,
    stop_time_limit,
)
from one_step_off.rewards.verifiers import REWARD_FUNCTIONS

# `Reward` is imported for agent loops of users that import it from here.
__all__ = ["Reward", "RewardError", "RewardItem", "Scorer"]


class Scorer:
    """Scores responses one after another, each within `reward.timeout_s` seconds; in the main
    thread only.

    A call that stays inside C code longer than the limit and a grace period ends this process, and
    Ray restarts it. See `time_limit.py`.
    """

    restarts = -1  # Ray restarts the process any number of times

    def __init__(self, cfg: RewardConfig, of_sources: Mapping[str, str] | None = None) -> None:
        """Import the reward functions. Raises ConfigError, see `RewardFunctions`."""
        self.cfg = cfg
        self.functions = RewardFunctions(cfg, of_sources)
        if any(name in REWARD_FUNCTIONS for name in self.functions.names):
            # Import it now: it takes about a second, which must not count for the first response.
            # Its warnings say that the caller must limit the time, which we do.
            importlib.import_module("math_verify")
            logging.getLogger("math_verify").setLevel(logging.CRITICAL)

    def score_batch(self, items: list[RewardItem]) -> list[Score | RewardError]:
        """Score responses.

        Returns:
            Per item, in order:
            a finite reward, or its parts by name;
            None, where a built-in verifier could not judge in time. That is the doing of the
            response (`9^{9^{9^9}}`) and must not stop the run: it counts as 0.0;
            a RewardError (returned, not raised), where the user's function took too long, raised,
            or returned something other than a finite number, a dict with one under "reward", or a
            dict of parts.

        Raises:
            ValueError: this is not the main thread.
        """
        with alarm_handler():
            return [self._score(item) for item in items]

    def _score(self, item: RewardItem) -> Score | RewardError:
        function = self.functions.find(item.data_source, item.source)
        begin = time.monotonic()
        outcome: Any
        try:
            outcome = self._call_within_limit(function, item)
        except BaseException as error:  # exit() too: Ray would take it for the end of this actor
            outcome = error
        # A function that swallowed the alarm (a bare `except:`) was late all the same.
        late = isinstance(outcome, TimeUp) or time.monotonic() - begin > self.cfg.timeout_s
        if late and function.built_in:
            return None
        if late:
            return self._late_error(function, item, outcome)
        if isinstance(outcome, RewardError):
            return RewardError(f"{function.name}, {item}: {outcome}")
        if isinstance(outcome, BaseException):
            return self._raised_error(function, item, outcome)
        return outcome

    def _call_within_limit(self, function: RewardFunction, item: RewardItem) -> Score:
        """The score of one item. Raises RewardError, TimeUp, or what the function raises."""
        start_time_limit(self.cfg.timeout_s)
        try:
            result = function(item)
            score = to_score(result)
            if score is None:
                raise RewardError(f"{_bad_result_text(result)}; {quote_response(item.response)}")
            return score
        finally:
            stop_time_limit()

    def _late_error(self, function: RewardFunction, item: RewardItem, outcome: Any) -> RewardError:
        """The error of a sample that was not judged in time.

        `outcome`: an exception, whose traceback shows where the alarm met the function, or what the
        function returned too late.
        """
        details = format_traceback(outcome) if isinstance(outcome, BaseException) else ""
        place = find_user_line(details, function.file)
        location = f" at {place}" if place else ""
        problem = f"took longer than reward.timeout_s={self.cfg.timeout_s:g} s{location}"
        message = f"{function.name}, {item}: {problem}; {quote_response(item.response)}"
        log_traceback(message, details)
        return RewardError(message, TIMEOUT, details)

    def _raised_error(
        self, function: RewardFunction, item: RewardItem, error: BaseException
    ) -> RewardError:
        """The error of a sample on which the function raised."""
        problem = (
            f"raised {describe_error(error, function.file)}: {str(error):.{MAX_MESSAGE_CHARS}}"
        )
        message = f"{function.name}, {item}: {problem}; {quote_response(item.response)}"
        details = format_traceback(error)
        log_traceback(message, details)
        return RewardError(message, details=details)


def _bad_result_text(result: Any) -> str:
    """What is wrong with the result of a reward function."""
    text = (
        f"returned {result!r:.200}, not a finite number (at most 1e+30), nor a dict of such, "
        'as {"reward": 1.0} or {"right": 1.0, "form": 0.5}'
    )
    if type(result) is dict and "score" in result:
        text += ' (the key "score" of other libraries is "reward" here)'
    return text
