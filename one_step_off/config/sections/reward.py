"""The config section reward."""

from dataclasses import dataclass
from typing import Any

from one_step_off.config.errors import ConfigError, value_error
from one_step_off.config.keys import config_key
from one_step_off.config.text import format_value
from one_step_off.config.user_code import (
    USER_FUNCTION_FORM,
    did_you_mean_function,
    is_user_spec,
)

# The names that rewards/functions.py registers, repeated because importing it takes long; a test
# keeps them equal.
BUILT_IN_REWARDS = ("gsm8k", "math")


@dataclass
class RewardConfig:
    """Rewards."""

    function: str = config_key(
        "gsm8k", "reward function: gsm8k, math, or your own as module:function"
    )
    timeout_s: float = config_key(10.0, "time limit for scoring one sample", above=0.0)
    kwargs: dict[str, Any] = config_key({}, "extra arguments for your reward function(s)")
    functions: dict[str, str] = config_key(
        {}, "instead of function: one for each data_source, e.g. {openai/gsm8k: gsm8k}"
    )
    workers: int = config_key(
        1, "number of scoring processes; a slow function needs several", low=1
    )
    weight: float = config_key(
        1.0,
        "weight of the function's score in the reward; reward_model.weight is that of the model",
        low=-1e6,
        high=1e6,
    )
    on_error: str = config_key(
        "stop",
        "if scoring, an agent loop or an external agent fails: stop the run, give reward zero, or "
        "drop the prompt",
        choices="stop zero drop",
    )
    overlong_buffer: int = config_key(
        0,
        "soft overlong penalty (DAPO): it grows linearly over this many "
        "last tokens of max_response_length",
        low=0,
    )
    overlong_penalty: float = config_key(
        1.0, "penalty of a response of max_response_length tokens", low=0.0
    )


def check_rewards(reward: RewardConfig) -> None:
    """Check the names of reward functions. Raises ConfigError."""
    check_reward("reward.function", reward.function)
    for source, name in reward.functions.items():
        check_reward(f"reward.functions.{format_value(source)}", name)
    if reward.functions and reward.function != RewardConfig.function:
        raise value_error(
            "reward.function",
            reward.function,
            "reward.functions names the function of every data_source; "
            "put it there, or remove one of the two",
        )


def check_reward(key: str, name: str) -> None:
    """Check the name of a reward function. Raises ConfigError."""
    if name not in BUILT_IN_REWARDS and not is_user_spec(name):
        otherwise = f"must be gsm8k, math, or your own as {USER_FUNCTION_FORM}"
        fix = did_you_mean_function(name, BUILT_IN_REWARDS, otherwise)
        raise ConfigError(f"{key}={format_value(name)}: no such function; {fix}")
