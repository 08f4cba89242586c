"""one_step_off: a one-step-off-policy PPO trainer for language models."""

__version__ = "0.1.0"
