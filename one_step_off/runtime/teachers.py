"""The teachers of a run: what is checked of their sources before it starts, and their processes."""

from collections.abc import Callable
from typing import Any

from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.config.teachers import (
    DEFAULT_TEACHER,
    config_of_teacher,
    teacher_key,
    teacher_of_row,
    teacher_of_sources,
    teacher_paths,
)
from one_step_off.config.text import did_you_mean
from one_step_off.data.run_data import RunData
from one_step_off.data.samples import Sample
from one_step_off.training.teachers import Teachers
from one_step_off.training.trainer_group import TrainGroup


def check_sources(cfg: Config, data: RunData) -> None:
    """Check that each source in `teacher.by_source` has rows. Raises ConfigError."""
    prompts = data.stream.prompts
    known = {prompt.source for prompt in prompts} | {prompt.data_source for prompt in prompts}
    known.discard("")
    for source in teacher_of_sources(cfg):
        if source not in known:
            listed = ", ".join(sorted(known)) or "none"
            fix = did_you_mean(source, known, f"the sources of the training data are: {listed}")
            path = cfg.teacher.by_source[source]
            raise ConfigError(f"{teacher_key(source)}={path}: no row has this source; {fix}")


def config_of_groups(cfg: Config, role: str) -> dict[str, Config]:
    """Name -> config, of each group of processes of a role: one, but for teachers."""
    if role != "teacher":
        return {role: cfg}
    return {_group_name(name): config_of_teacher(cfg, name) for name in teacher_paths(cfg)}


def _group_name(teacher: str) -> str:
    return "teacher" if teacher == DEFAULT_TEACHER else f"teacher.{teacher}"


def teachers_of(cfg: Config, groups: dict[str, TrainGroup], data: RunData) -> Teachers:
    """The teachers for the pipeline, out of all groups of the run."""
    own: dict[str, Any] = {name: groups[_group_name(name)] for name in teacher_paths(cfg)}
    return Teachers(own, teacher_lookup(cfg, data), cfg.teacher.top_k)


def teacher_lookup(cfg: Config, data: RunData) -> Callable[[Sample], str]:
    """Returns the name of a sample's teacher."""
    teachers = teacher_of_sources(cfg)

    def name_of(sample: Sample) -> str:
        prompt = data.find(sample.prompt_id)
        if prompt is None:
            return DEFAULT_TEACHER
        return teacher_of_row(teachers, prompt.source, prompt.data_source)

    return name_of
