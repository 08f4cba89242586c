"""Checks of data, rewards and agent loops by name, and of where the run writes."""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from one_step_off.config import packages
from one_step_off.config.errors import ConfigError, key_error, refuse_here
from one_step_off.config.schema import Config, RewardConfig
from one_step_off.config.source_checks import check_sources
from one_step_off.config.sources import split_files
from one_step_off.config.text import did_you_mean, format_value
from one_step_off.config.user_code import is_user_spec, similar_spec

FILE_ENDINGS = (".jsonl", ".json", ".parquet")
# The names that other packages register. They are repeated here because importing their owners
# takes long; a test keeps them equal.
GENERATORS = ("word_problems", "addition", "products", "puzzles")
ENVIRONMENT_SOURCE = "environment"
BUILT_IN_REWARDS = ("gsm8k", "math")
BUILT_IN_LOOPS = ("single_turn", "tool", "retry_with_feedback", "environment", "external")
BUILT_IN_TOOLS = ("calculator", "python")
USER_FUNCTION_FORM = "module:function, where the module is in this folder or on PYTHONPATH"
USER_CLASS_FORM = "module:Class, where the module is in this folder or on PYTHONPATH"
EXTERNAL_LOOP = "external"  # agents in processes of their own

TEMPLATE_ARGUMENTS = (
    *("conversation", "messages", "tools", "chat_template", "tokenize"),
    *("add_generation_prompt", "continue_final_message", "return_dict", "return_tensors"),
    *("return_assistant_tokens_mask", "padding", "truncation", "max_length", "tokenizer_kwargs"),
)
"""What the program itself tells a chat template, or the tokenizer: no settings of a template."""


def check_data(cfg: Config) -> None:
    """Check the data sources, and the reward functions that score them. Raises ConfigError."""
    for name, files in cfg.data.val_sets.items():
        # The metrics of a set "reward" would have the names of parts of the main set's reward.
        is_name = name not in ("val", "reward") and re.fullmatch(r"[A-Za-z0-9_.-]+", name)
        if not is_name or not files.strip(" ,"):
            raise ConfigError(
                f"data.val_sets.{format_value(name)}={format_value(files)}: "
                "must have a name of letters, digits, _.- (not val or reward), and files"
            )
    files_by_key = {"val_files": cfg.data.val_files}
    if isinstance(cfg.data.train_files, str):
        files_by_key = {"train_files": cfg.data.train_files} | files_by_key
    for name, files in cfg.data.val_sets.items():
        files_by_key[f"val_sets.{name}"] = files
    for key, files in files_by_key.items():
        for source in split_files(files):
            check_source(f"data.{key}", source)
    _check_template_settings(cfg)
    _check_rewards(cfg)
    check_sources(cfg, check_source, _check_loop, _check_reward)


def _check_template_settings(cfg: Config) -> None:
    """Raises ConfigError: a setting of the chat template is none, or there is no template."""
    key = "data.chat_template_kwargs"
    settings = cfg.data.chat_template_kwargs
    for name in TEMPLATE_ARGUMENTS:
        if name in settings:
            raise key_error(cfg, key, f"{name} is set by the program; remove it")
    if settings and cfg.data.chat_template == "never":
        raise key_error(cfg, key, "data.chat_template=never uses no template; remove one of them")


def check_source(key: str, source: str) -> None:
    """Check one file, generator or hub id; empty: nothing. Raises ConfigError."""
    if not source or source == ENVIRONMENT_SOURCE:
        return
    location = f"{key}={format_value(source)}"
    if source.startswith("generator:"):
        if source.removeprefix("generator:") not in GENERATORS:
            otherwise = f"use generator:{' or generator:'.join(GENERATORS)}"
            fix = did_you_mean(source.removeprefix("generator:"), GENERATORS, otherwise)
            fix = fix.replace("did you mean ", "did you mean generator:")
            raise ConfigError(f"{location}: no such generator; {fix}")
    elif source.endswith(FILE_ENDINGS):
        if not os.path.isfile(source):
            problem = f"no such file (working directory {os.getcwd()}); check the path"
            refuse_here(ConfigError(f"{location}: {problem}"))
    else:
        exists = os.path.exists(source)
        may_be_hub_id = re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", source)
        if exists or not may_be_hub_id:
            missing = "" if exists else "no such file or folder; "
            raise ConfigError(
                f"{location}: {missing}must be a {', '.join(FILE_ENDINGS)} file, "
                "generator:NAME or a hub id"
            )


def _check_rewards(cfg: Config) -> None:
    _check_reward("reward.function", cfg.reward.function)
    for source, name in cfg.reward.functions.items():
        _check_reward(f"reward.functions.{format_value(source)}", name)
    if cfg.reward.functions and cfg.reward.function != RewardConfig.function:
        raise key_error(
            cfg,
            "reward.function",
            "reward.functions names the function of every data_source; "
            "put it there, or remove one of the two",
        )


def _check_reward(key: str, name: str) -> None:
    if name not in BUILT_IN_REWARDS and not is_user_spec(name):
        otherwise = f"must be gsm8k, math, or your own as {USER_FUNCTION_FORM}"
        fix = did_you_mean_function(name, BUILT_IN_REWARDS, otherwise)
        raise ConfigError(f"{key}={format_value(name)}: no such function; {fix}")


def did_you_mean_function(spec: str, names: Iterable[str], otherwise: str) -> str:
    """As `did_you_mean`, for a built-in name or the user's `module:function`."""
    similar = similar_spec(spec)
    return f"did you mean {similar}?" if similar else did_you_mean(spec, names, otherwise)


def check_agent(cfg: Config) -> None:
    """Check the names of agent loops and tools. Raises ConfigError."""
    _check_loop("agent.loop", cfg.agent.loop)
    for name in cfg.agent.loop_kwargs:
        _check_loop("agent.loop_kwargs", name)
    for tool in cfg.agent.tools.split(","):
        _check_tool(tool.strip())
    for name, settings in cfg.agent.loop_kwargs.items():
        if not isinstance(settings, dict):
            raise ConfigError(
                f"agent.loop_kwargs.{name}={format_value(settings)}: "
                "must be a mapping of this loop's settings, such as {format: llama}"
            )


def _check_loop(key: str, spec: str) -> None:
    if spec in BUILT_IN_LOOPS or is_user_spec(spec):
        return
    otherwise = f"use {', '.join(BUILT_IN_LOOPS)}, or your own as {USER_CLASS_FORM}"
    fix = did_you_mean_function(spec, BUILT_IN_LOOPS, otherwise)
    raise ConfigError(f"{key}={format_value(spec)}: no such name; {fix}")


def _check_tool(spec: str) -> None:
    if not spec or spec in BUILT_IN_TOOLS or spec.startswith("mcp:http") or is_user_spec(spec):
        return
    otherwise = f"use {', '.join(BUILT_IN_TOOLS)}, or your own as {USER_FUNCTION_FORM}"
    fix = did_you_mean_function(spec, BUILT_IN_TOOLS, otherwise)
    raise ConfigError(f"agent.tools={format_value(spec)}: no such name; {fix}")


def check_output(cfg: Config) -> None:
    """Check where the run writes, what it resumes from, and the packages of its loggers."""
    output_dir = cfg.trainer.output_dir
    if not output_dir.strip():
        raise key_error(cfg, "trainer.output_dir", "not set; name a folder, such as outputs/run")
    parent = _nearest_existing_folder(output_dir)
    is_writable = os.path.isdir(parent) and os.access(parent, os.W_OK | os.X_OK)
    if not is_writable or "\0" in output_dir:
        problem = f"{parent} is not a folder that can be written to; name another"
        refuse_here(key_error(cfg, "trainer.output_dir", problem))
    _check_resume(cfg)
    for name in ("tensorboard", "wandb"):
        if getattr(cfg.logging, name) and not packages.is_installed(name):
            problem = f"the package {name} is missing; pip install {name}, or set it to false"
            refuse_here(key_error(cfg, f"logging.{name}", problem))
    if cfg.logging.wandb and not cfg.logging.wandb_project.strip():
        raise key_error(cfg, "logging.wandb_project", "empty; name a project")


def _nearest_existing_folder(path: str) -> Path:
    """The path itself if it exists, or its nearest parent that does."""
    absolute = Path(os.path.abspath(path))
    for folder in (absolute, *absolute.parents):
        if os.path.lexists(folder):
            return folder
    return Path("/")


def _check_resume(cfg: Config) -> None:
    resume = cfg.trainer.resume
    if resume in ("auto", "never") or os.path.isfile(os.path.join(resume, "state.json")):
        return
    fix = did_you_mean(
        resume, ("auto", "never"), "use auto, never, or OUTPUT_DIR/checkpoints/step_000050"
    )
    problem = f"no checkpoint there (state.json is missing); {fix}"
    refuse_here(key_error(cfg, "trainer.resume", problem))
