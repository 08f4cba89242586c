"""The teachers of a config: their names, their models, and which of them a row has."""

from collections.abc import Mapping
from dataclasses import replace

from one_step_off.config.schema import Config

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


def processes_per_slot(cfg: Config, pool: str | None) -> int:
    """How many processes share each slot of a pool: one of each role, and of each teacher."""
    roles = [role for role, its_pool in cfg.placement.roles.items() if its_pool == pool]
    count = len(roles)
    if "teacher" in roles:
        count += len({cfg.teacher.path, *cfg.teacher.by_source.values()}) - 1
    return count


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
