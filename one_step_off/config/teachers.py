"""The teachers of a config: their names, their models, which of them a row has, and the checks of
the role teacher: its back end, and what the distillation needs.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from one_step_off.config.errors import ConfigError, key_error
from one_step_off.config.placement import devices_per_node, roles_in_pool
from one_step_off.config.pool_checks import nearest_divisor
from one_step_off.config.roles import role_settings
from one_step_off.config.schema import Config
from one_step_off.config.sections.model import check_model_path
from one_step_off.config.sections.rollout import ENGINE_FIELDS_SET_BY_US
from one_step_off.config.text import format_value

DEFAULT_TEACHER = "default"
"""The name of the teacher in `teacher.path`."""


def teacher_paths(cfg: Config) -> dict[str, str]:
    """Teacher name -> its model; {} without the role teacher.

    The teacher of `teacher.path` comes first. The others are named after the first source in
    `teacher.by_source` that has them: sources with one model have one teacher.
    """
    if "teacher" not in cfg.placement.roles:
        return {}
    paths = {DEFAULT_TEACHER: cfg.teacher.path}
    for source, path in cfg.teacher.by_source.items():
        if path not in paths.values():
            paths[source] = path
    return paths


def teacher_of_sources(cfg: Config) -> dict[str, str]:
    """Source -> the name of its teacher, for the sources in `teacher.by_source`."""
    name_of_path = {path: name for name, path in teacher_paths(cfg).items()}
    return {source: name_of_path[path] for source, path in cfg.teacher.by_source.items()}


def teacher_of_row(teachers: Mapping[str, str], source: str, data_source: str) -> str:
    """The name of the teacher of a row.

    Args:
        teachers: of `teacher_of_sources`.
        source, data_source: of the row's `Prompt`. The name of a source in `data.train_files` wins.
    """
    return teachers.get(source) or teachers.get(data_source) or DEFAULT_TEACHER


def teacher_key(name: str) -> str:
    """The config key that holds a teacher's model."""
    return "teacher.path" if name == DEFAULT_TEACHER else f"teacher.by_source.{name}"


def config_of_teacher(cfg: Config, name: str) -> Config:
    """The config as the processes of one teacher see it: `teacher.path` is its own model, and
    `teacher.by_source` holds the other teachers."""
    others = teacher_paths(cfg)
    path = others.pop(name)
    return replace(cfg, teacher=replace(cfg.teacher, path=path, by_source=others))


def configs_of_roles(cfg: Config) -> Iterator[tuple[Config, str]]:
    """The roles with a model, each with the config as its processes see it: the role teacher once
    for each of its models."""
    for role in cfg.placement.roles:
        if role == "teacher":
            for name in teacher_paths(cfg):
                yield config_of_teacher(cfg, name), role
        elif role != "rollout":
            yield cfg, role


NO_REWARD_ESTIMATOR = "none"
"""The estimator of a run that trains on its teacher alone."""

# Settings of the training back ends that an engine does not have, and the value that turns each
# off.
_NOT_OF_ENGINES = {
    "pipeline_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_parallel_size": 1,
    "sequence_parallel_size": 1,
    "sequence_parallel": False,
    "virtual_pipeline_parallel_size": None,
    "fsdp_size": -1,
    "torch_compile": None,
    "param_offload": False,
}

SET_BY_KEYS = {
    "model": "teacher.path",
    "tensor_parallel_size": "teacher.tensor_parallel_size",
    "dtype": "model.dtype",
}
"""Fields of vLLM's engine that one of our keys sets."""


def check_teacher(cfg: Config) -> None:
    """Check the section teacher against the roles, and the distillation against the back ends.
    Raises ConfigError."""
    has_role = "teacher" in cfg.placement.roles
    if has_role != bool(cfg.teacher.path):
        raise key_error(
            cfg, "teacher.path", "goes with placement.roles.teacher; set both or neither"
        )
    if cfg.algorithm.adv_estimator == NO_REWARD_ESTIMATOR and not has_role:
        raise key_error(
            cfg,
            "algorithm.adv_estimator",
            "trains on no reward, so it needs a teacher; set teacher.path and "
            "placement.roles.teacher, or another estimator",
        )
    if not has_role:
        return
    _check_reward_is_only_measured(cfg)
    _check_sources(cfg)
    _check_top_k(cfg)
    settings = role_settings(cfg, "teacher")
    if settings.backend == "vllm":
        _check_engine(cfg)
    elif cfg.teacher.engine_kwargs:
        raise key_error(
            cfg,
            "teacher.engine_kwargs",
            f"teacher.backend={settings.backend} has no engine; remove it, or set "
            "teacher.backend=vllm",
        )


def _check_reward_is_only_measured(cfg: Config) -> None:
    """Refuse what acts on training through the reward's advantages, where there are none."""
    if cfg.algorithm.adv_estimator != NO_REWARD_ESTIMATOR:
        return
    reason = f"algorithm.adv_estimator={NO_REWARD_ESTIMATOR} trains on no reward, so this would"
    if cfg.algorithm.kl_in_reward:
        raise key_error(
            cfg,
            "algorithm.kl_in_reward",
            f"{reason} do nothing; set it to false, which puts the KL into the loss",
        )
    if cfg.algorithm.max_gen_batches > 1:
        raise key_error(
            cfg,
            "algorithm.max_gen_batches",
            f"{reason} choose prompts by a reward that is only measured; set it to 1",
        )
    if cfg.reward.overlong_buffer:
        raise key_error(cfg, "reward.overlong_buffer", f"{reason} do nothing; set it to 0")


def _check_sources(cfg: Config) -> None:
    for source, path in cfg.teacher.by_source.items():
        key = teacher_key(str(source))
        if not str(source).strip() or source == DEFAULT_TEACHER:
            raise ConfigError(
                f"teacher.by_source.{format_value(source)}={format_value(path)}: is not the name "
                "of a source; teacher.path is the teacher of all other rows"
            )
        check_model_path(key, path)


def _check_top_k(cfg: Config) -> None:
    for role in ("actor", "teacher"):
        backend = role_settings(cfg, role).backend
        if cfg.teacher.top_k and backend == "megatron":
            raise key_error(
                cfg,
                "teacher.top_k",
                f"{role}.backend=megatron divides the vocabulary over its ranks and looks up the "
                f"sampled tokens alone; set it to 0, or {role}.backend=fsdp",
            )


def _check_engine(cfg: Config) -> None:
    """Check a teacher in an engine: its pool, its settings, and that its log-probs can be those of
    the run's temperature."""
    pool = cfg.placement.roles["teacher"]
    others = roles_in_pool(cfg, pool)
    others.remove("teacher")
    location = f"teacher.backend=vllm and placement.roles.teacher={pool}"
    if others or len({cfg.teacher.path, *cfg.teacher.by_source.values()}) > 1:
        problem = f"shares the pool with {', '.join(others)}" if others else "has several teachers"
        raise ConfigError(
            f"{location}: {problem}, and an engine keeps its memory; "
            + ("give it a pool of its own" if others else "use teacher.backend=fsdp")
        )
    if cfg.rollout.temperature != 1:
        raise key_error(
            cfg,
            "rollout.temperature teacher.backend",
            "vLLM scores given tokens at temperature 1 only; set rollout.temperature=1, or "
            "teacher.backend=fsdp",
        )
    _check_engine_settings(cfg, pool)


def _check_engine_settings(cfg: Config, pool: str) -> None:
    settings = role_settings(cfg, "teacher")
    for name, off in _NOT_OF_ENGINES.items():
        if getattr(cfg.teacher, name) not in (None, off):
            raise key_error(
                cfg, f"teacher.{name}", "teacher.backend=vllm does not have it; remove it"
            )
    for name, value in cfg.teacher.engine_kwargs.items():
        location = f"teacher.engine_kwargs.{format_value(name)}={format_value(value)}"
        if name in SET_BY_KEYS:
            raise ConfigError(f"{location}: use {SET_BY_KEYS[name]}")
        if name in ENGINE_FIELDS_SET_BY_US:
            raise ConfigError(f"{location}: the program sets it; remove it")
        if name == "max_model_len":
            _check_longest_prompt(cfg, value, location)
    width = settings.tensor_parallel_size
    nodes = devices_per_node(cfg, pool)
    for node, gpus in enumerate(nodes):
        if gpus % width:
            raise key_error(
                cfg,
                "teacher.tensor_parallel_size",
                f"does not divide placement.pools.{pool}, {gpus} GPUs on node {node}; "
                f"use {nearest_divisor(math.gcd(*nodes), width)}, or change the pool",
            )


def _check_longest_prompt(cfg: Config, value: Any, location: str) -> None:
    # An engine takes a prompt only where one more token fits.
    longest = cfg.data.max_prompt_length + cfg.data.max_response_length + 1
    if type(value) is not int or value < longest:
        raise ConfigError(
            f"{location}: prompt, response and one more token may be {longest} tokens; "
            f"remove it, or use at least {longest}"
        )
