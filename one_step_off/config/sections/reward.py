"""The config section reward."""

from dataclasses import dataclass
from typing import Any

from one_step_off.config.keys import config_key


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
