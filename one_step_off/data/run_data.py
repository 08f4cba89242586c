"""The data of a run: its training stream, its held-out prompts, and the reports on both."""

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from one_step_off.config.errors import ConfigError, located_config_error
from one_step_off.config.schema import Config
from one_step_off.config.sections.agent import EXTERNAL_LOOP
from one_step_off.config.sections.data import (
    SourceConfig,
    curriculum,
    difficulty_filter,
    source_of,
    source_rewards,
    train_sources,
)
from one_step_off.data.environment_rows import read_tasks
from one_step_off.data.evaluation import MAIN_SET, set_epoch
from one_step_off.data.images import Images, ImageTokens
from one_step_off.data.mixture import DrawRules, MixedStream, PromptSource
from one_step_off.data.plain_numbers import looks_like_number, plain_number
from one_step_off.data.prompt_stream import PromptStream
from one_step_off.data.rows import DataReport, Row, load_rows
from one_step_off.data.samples import Prompt, PromptId
from one_step_off.data.tokenization import ToolsOfLoop, no_tools, tokenize_rows

# Generated held-out problems do not depend on trainer.seed, so that runs with different seeds are
# evaluated on the same problems.
HELD_OUT_SEED = 0
# What these return may hold the reward.
LOOPS_WITH_REWARD = (EXTERNAL_LOOP, "environment")


@dataclass
class RunData:
    """What a run trains on and is evaluated on.

    Attributes:
        stream: the training prompts.
        val: the prompts of all held-out sets; None where there are none.
        reports: one for each source of training data, then one for each held-out set.
        val_names: the names of the held-out sets.
    """

    stream: PromptStream | MixedStream
    val: list[Prompt] | None
    reports: list[DataReport]
    val_names: list[str]

    def lines(self) -> list[str]:
        """The reports, for the user."""
        return [line for report in self.reports for line in report.lines()]

    def find(self, id: PromptId) -> Prompt | None:
        """The prompt of an id, of any epoch: the row of a prompt does not change between epochs."""
        return self._prompts_by_id.get(id) or self._prompts_by_id.get(id[1])

    @cached_property
    def _prompts_by_id(self) -> dict[PromptId | int, Prompt]:
        """Training prompts by row, held-out prompts by id."""
        by_row: dict[PromptId | int, Prompt] = {p.id[1]: p for p in self.stream.prompts}
        return by_row | {prompt.id: prompt for prompt in self.val or ()}


def load_run_data(
    cfg: Config,
    tokenizer: Any,
    tools_of_loop: ToolsOfLoop = no_tools,
    images: ImageTokens | None = None,
) -> RunData:
    """Read, check and tokenize the training and held-out sets of a run.

    Training prompts have ids (0, row), those of the first held-out set (-1, row), of the second
    (-2, row), and so on. A held-out set with the name of a source has that source's agent loop,
    reward function and limits. `images`: of a model that reads them, see `tokenize_rows`.

    Raises ConfigError: see `load_rows` and `tokenize_rows`.
    """
    sources, reports = _training_sources(cfg, tokenizer, tools_of_loop, images)
    stream = _training_stream(cfg, sources)
    training_contents = {(prompt.text, prompt.images) for prompt in stream.prompts}
    held_out_sets = _held_out_sets(cfg)
    held_out_prompts: list[Prompt] = []
    if cfg.data.val_size:
        for index, (name, files) in enumerate(held_out_sets.items()):
            set_report = DataReport(
                "held-out data" if name == MAIN_SET else f"held-out data {name}"
            )
            reports.append(set_report)
            rows = load_rows(
                files,
                "test",
                cfg.data,
                HELD_OUT_SEED,
                set_report,
                cfg.data.val_size,
                partial(read_tasks, cfg),
                images is not None,
            )
            rows = _rows_of_source(rows, source_of(cfg.data, name))
            rows = _rows_with_labels(rows, cfg, set_report)
            set_prompts = tokenize_rows(
                rows, tokenizer, cfg.data, set_epoch(index), set_report, tools_of_loop, images
            )
            _note_overlap(set_prompts, training_contents, set_report)
            held_out_prompts += set_prompts
    return RunData(stream, held_out_prompts or None, reports, list(held_out_sets))


def _training_sources(
    cfg: Config, tokenizer: Any, tools_of_loop: ToolsOfLoop, images: ImageTokens | None
) -> tuple[list[PromptSource], list[DataReport]]:
    """The training prompts by source, and a report on each source. Rows are counted over all of
    them.

    Raises ConfigError: see `load_run_data`; or a loop of a source cannot be loaded.
    """
    named_sources = train_sources(cfg.data.train_files)
    settings = named_sources or [SourceConfig(files=str(cfg.data.train_files))]
    sources = []
    reports = []
    first_row = 0
    for source in settings:
        if source.agent_loop:
            key = f"data.train_files, {source.name}: agent_loop={source.agent_loop}"
            with located_config_error(f"{key}: "):
                tools_of_loop(source.agent_loop)
        report = DataReport(f"training data {source.name}".rstrip())
        rows = load_rows(
            source.files,
            "train",
            cfg.data,
            cfg.trainer.seed,
            report,
            read_tasks=partial(read_tasks, cfg),
            reads_images=images is not None,
        )
        rows = [replace(row, id=(0, first_row + row.id[1])) for row in rows]
        rows = _rows_of_source(rows, source)
        rows = _rows_with_labels(rows, cfg, report)
        prompts = tokenize_rows(rows, tokenizer, cfg.data, 0, report, tools_of_loop, images)
        sources.append(PromptSource(source.name, prompts, source.weight))
        reports.append(report)
        first_row += report.rows
    return sources, reports


def _rows_of_source(rows: list[Row], source: SourceConfig) -> list[Row]:
    """The rows with the name and the agent loop of their source. A loop of their own stays."""
    if not source.name:
        return rows
    return [
        replace(row, source=source.name, agent_loop=row.agent_loop or source.agent_loop)
        for row in rows
    ]


def _rows_with_labels(rows: list[Row], cfg: Config, report: DataReport) -> list[Row]:
    """The rows whose ground truth some answer can equal. `gsm8k` compares numbers, and reads none
    in `12,5`.

    Raises ConfigError: there are others, and `data.bad_rows` is "fail" or no row is left.
    """
    functions = source_rewards(cfg.data)
    good = []
    for row in rows:
        default = cfg.reward.functions.get(row.data_source, cfg.reward.function)
        is_judged = (row.agent_loop or cfg.agent.loop) not in LOOPS_WITH_REWARD
        is_number = is_judged and functions.get(row.source, default) == "gsm8k"
        truth = row.ground_truth.strip()
        if is_number and looks_like_number(truth) and plain_number(truth) is None:
            reason = f"'ground_truth' holds {truth[:40]!r}, not a number that gsm8k reads"
            report.skip(row.where, reason, cfg.data)
        else:
            good.append(row)
    if rows and not good:
        location, reason = report.bad[-1]
        raise ConfigError(f"{report.name}: all rows are malformed; fix {location}: {reason}")
    return good


def _training_stream(cfg: Config, sources: list[PromptSource]) -> PromptStream | MixedStream:
    """A plain stream where there is one source and its order depends on no results."""
    order = (
        cfg.data.train_batch_size,
        cfg.data.shuffle,
        cfg.trainer.seed,
        cfg.trainer.total_steps or 0,
        cfg.trainer.total_epochs or 0,
    )
    draw = DrawRules(cfg.data.solved_at, difficulty_filter(cfg.data), curriculum(cfg.data))
    is_plain = not sources[0].name and draw.rules is None and draw.curriculum is None
    if is_plain:
        return PromptStream(sources[0].prompts, *order)
    return MixedStream(sources, *order, draw=draw)


def _held_out_sets(cfg: Config) -> dict[str, str]:
    """Name -> files of each held-out set; that of data.val_files comes first."""
    sets = {}
    if cfg.data.val_files.strip():
        sets[MAIN_SET] = cfg.data.val_files
    return sets | cfg.data.val_sets


def _note_overlap(
    prompts: list[Prompt], training_contents: set[tuple[str, Images]], report: DataReport
) -> None:
    """Warn of held-out prompts that the training data holds too, with the same images."""
    shared = sum((prompt.text, prompt.images) in training_contents for prompt in prompts)
    if shared:
        report.notes.append(
            f"warning: {shared} of the {len(prompts)} held-out prompts "
            "are also in the training data"
        )
