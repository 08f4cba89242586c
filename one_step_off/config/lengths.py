"""How many tokens the longest sequences of a run have, by its config."""

from one_step_off.config.schema import Config


def longest_sequence(cfg: Config) -> int:
    """Tokens of the longest prompt with the longest response, of training or of evaluation."""
    longest_evaluation = cfg.rollout.val_max_response_length or 0
    longest_response = max(cfg.data.max_response_length, longest_evaluation)
    return cfg.data.max_prompt_length + longest_response


def longest_trained(cfg: Config) -> int:
    """Tokens of the longest sequence that a trainer sees: held-out responses may be longer."""
    if "rollout" not in cfg.placement.roles:
        return longest_row(cfg)
    return cfg.data.max_prompt_length + cfg.data.max_response_length


def longest_row(cfg: Config) -> int:
    """Tokens of the longest row of supervised steps."""
    if cfg.sft.max_length is not None:
        return cfg.sft.max_length
    return cfg.data.max_prompt_length + cfg.data.max_response_length


def engine_length(cfg: Config) -> int:
    """vLLM's `max_model_len`, by which it chooses the frequencies of some rotary embeddings.
    Without an engine: tokens of the longest row."""
    if "max_model_len" in cfg.rollout.engine_kwargs:
        return cfg.rollout.engine_kwargs["max_model_len"]
    if "rollout" not in cfg.placement.roles:
        return longest_row(cfg)
    return longest_sequence(cfg)
