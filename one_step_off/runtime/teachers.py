"""The processes of a run's teachers: a group for each."""

from typing import Any

from one_step_off.config.schema import Config
from one_step_off.config.teachers import DEFAULT_TEACHER, config_of_teacher, teacher_paths
from one_step_off.data.run_data import RunData
from one_step_off.data.teacher_rows import teacher_lookup
from one_step_off.training.teachers import Teachers
from one_step_off.training.trainer_group import WorkerGroup


def config_of_groups(cfg: Config, role: str) -> dict[str, Config]:
    """Name -> config, of each group of processes of a role: one, but for teachers."""
    if role != "teacher":
        return {role: cfg}
    return {_group_name(name): config_of_teacher(cfg, name) for name in teacher_paths(cfg)}


def _group_name(teacher: str) -> str:
    return "teacher" if teacher == DEFAULT_TEACHER else f"teacher.{teacher}"


def teachers_of(cfg: Config, groups: dict[str, WorkerGroup], data: RunData) -> Teachers:
    """The teachers for the pipeline, out of all groups of the run."""
    own: dict[str, Any] = {name: groups[_group_name(name)] for name in teacher_paths(cfg)}
    return Teachers(own, teacher_lookup(cfg, data), cfg.teacher.top_k)
