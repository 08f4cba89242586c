"""Which teacher scores which rows of a run's data."""

from collections.abc import Callable

from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.config.teachers import (
    DEFAULT_TEACHER,
    teacher_key,
    teacher_of_row,
    teacher_of_sources,
)
from one_step_off.config.text import did_you_mean
from one_step_off.data.run_data import RunData
from one_step_off.data.samples import Sample


def check_teacher_sources(cfg: Config, data: RunData) -> None:
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


def teacher_lookup(cfg: Config, data: RunData) -> Callable[[Sample], str]:
    """Returns the name of a sample's teacher."""
    teachers = teacher_of_sources(cfg)

    def name_of(sample: Sample) -> str:
        prompt = data.find(sample.prompt_id)
        if prompt is None:
            return DEFAULT_TEACHER
        return teacher_of_row(teachers, prompt.source, prompt.data_source)

    return name_of
