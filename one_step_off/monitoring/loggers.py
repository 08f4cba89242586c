"""The loggers of a run: TensorBoard, Weights & Biases, Prometheus, and the sample files.

All of it happens in one thread beside the pipeline. A logger that fails is named once and disabled:
a broken dashboard must not end a run that has worked for days."""

import hashlib
import json
import math
import queue
import re
import secrets
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from one_step_off.config.errors import ConfigError, as_config_error
from one_step_off.config.registry import import_object
from one_step_off.config.schema import Config
from one_step_off.config.yaml_io import parse_yaml, resolved_yaml
from one_step_off.data.images import media_type
from one_step_off.data.samples import NOT_GENERATED, Batch, PromptLookup, Sample
from one_step_off.monitoring.sample_parts import Decode, has_parts, parts_of_sample

SAMPLE_FOLDER = "samples"
STEP_PREFIX = "step_"
EVALUATION_PREFIX = "val_v"
CLOSE_TIMEOUT_S = 60.0
MAX_PENDING_JOBS = 32
# Entries of `Sample.extra` that the pipeline alone reads.
IMAGE_FOLDER = "images"
"""Below SAMPLE_FOLDER."""

INTERNAL_EXTRAS = ("greedy", "replaces", "replaced_work", "draft_tokens")


@dataclass(frozen=True)
class LogEntry:
    """What loggers write of a step or of an evaluation.

    Attributes:
        figures: the finite metrics by name.
        step: of an evaluation the weight version.
        is_evaluation: whether it is one.
        samples: of the step or evaluation; none for an evaluation that an earlier run has written.
        advantages: of a step, one array [R] per trained sample; the samples that were dropped come
            after these.
    """

    figures: dict[str, float]
    step: int
    is_evaluation: bool
    samples: list[Sample]
    advantages: list[np.ndarray] = field(default_factory=list)

    @property
    def sample_file(self) -> str:
        """The name of the file for its samples."""
        prefix = EVALUATION_PREFIX if self.is_evaluation else STEP_PREFIX
        return f"{prefix}{self.step:06d}.jsonl"


class Logger(Protocol):
    """One place to which a run is written. Its methods are called in the loggers' thread."""

    def write(self, entry: LogEntry) -> None:
        """Write a step or an evaluation."""

    def close(self, failed: bool) -> None:
        """Write what is left. `failed`: the run ended by an error."""


class TensorBoard:
    """Event files in tensorboard/. Held-out figures are shown at the version that was evaluated."""

    def __init__(self, folder: Path, config_text: str, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What an earlier run in this folder wrote from here on is hidden.
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)
        code_block = "    " + config_text.replace("\n", "\n    ")
        self.writer.add_text("config", code_block, first_step)

    def write(self, entry: LogEntry) -> None:
        """Each figure is a scalar."""
        for name, value in entry.figures.items():
            self.writer.add_scalar(name, value, entry.step)
        self.writer.flush()

    def close(self, failed: bool) -> None:
        """Write what is left."""
        self.writer.close()


class Wandb:
    """One W&B run per run folder: its id is kept in `wandb_run_id`, and a resumed run continues it.

    Attributes:
        link: where the W&B run can be seen.
    """

    def __init__(self, cfg: Config, resumed: bool) -> None:
        """Start or continue the W&B run. Not `resumed`: a new one with a new id.

        Raises:
            ConfigError: W&B does not start, as where it is not logged in.
        """
        import wandb

        folder = Path(cfg.trainer.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        is_offline = cfg.logging.wandb_mode == "offline"
        id_file = folder / "wandb_run_id"
        if resumed and id_file.exists():
            run_id = id_file.read_text().strip()
        else:
            run_id = secrets.token_hex(4)
        settings = wandb.Settings(silent=True, console="off")
        fix = "run `wandb login`, or set logging.wandb_mode=offline"
        with as_config_error("logging.wandb=true: W&B does not start", fix):
            # Without it W&B would ask for a login at the terminal, in the middle of the bar.
            wandb.setup(settings=settings)
            self.run = wandb.init(
                id=run_id,
                # Offline runs of one id become one run when they are sent.
                resume=None if is_offline else "allow",
                mode=cfg.logging.wandb_mode,
                project=cfg.logging.wandb_project,
                name=folder.resolve().name,
                dir=str(folder),
                config=parse_yaml(resolved_yaml(cfg))[0],
                settings=settings,
            )
        id_file.write_text(run_id + "\n")
        # W&B warns when an offline run is asked for its address.
        self.link = f"offline, in {folder / 'wandb'}" if is_offline else self.run.url
        # Our own steps, since W&B's only count upwards and a resumed run may start before the last
        # row.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        self.run.define_metric("val/*", step_metric="val/version")

    def write(self, entry: LogEntry) -> None:
        """One row of figures."""
        row = dict(entry.figures)
        if not entry.is_evaluation:
            row["step"] = entry.step
        self.run.log(row)

    def close(self, failed: bool) -> None:
        """Send what is left."""
        self.run.finish(exit_code=int(failed))


class GaugeNames:
    """The name of each metric at Prometheus: no two metrics share one, and none changes its own.

    "reward/mean" is one_step_off_reward_mean: / @ . and - become _. Another character becomes its
    code, "a b" is a_x20_b. A metric whose name is taken by then gets a checksum behind it.
    """

    def __init__(self) -> None:
        self._of_metrics: dict[str, str] = {}

    def add(self, metrics: Iterable[str]) -> None:
        """Name new metrics. Of those for one name, the one that is most like ours gets it: of
        letters and underscores, and with levels, though few."""
        new = [metric for metric in metrics if metric not in self._of_metrics]
        for metric in sorted(new, key=_likeness):
            name = _gauge_name(metric)
            while name in self._of_metrics.values():
                name += "_" + hashlib.sha256(metric.encode("utf-8", "replace")).hexdigest()[:8]
            self._of_metrics[metric] = name

    def __getitem__(self, metric: str) -> str:
        return self._of_metrics[metric]


def _likeness(metric: str) -> tuple[int, int, bool, int, str]:
    """Sorts names of metrics by how little they are like ours."""
    other_characters = len(re.sub("[A-Za-z0-9_/]", "", metric))
    return -len(metric), other_characters, "/" not in metric, metric.count("/"), metric


def _gauge_name(metric: str) -> str:
    escaped = re.sub(r"[^A-Za-z0-9_/@.-]", lambda match: f"_x{ord(match[0]):x}_", metric)
    return "one_step_off_" + re.sub(r"[^A-Za-z0-9_]", "_", escaped)


class Prometheus:
    """The newest figures as gauges at http://127.0.0.1:PORT/metrics: "reward/mean" is
    one_step_off_reward_mean."""

    def __init__(self, port: int) -> None:
        """Start the server. Raises ConfigError: the port is taken or not allowed."""
        from prometheus_client import CollectorRegistry, start_http_server

        self.newest_figures: dict[str, float] = {}
        self.names = GaugeNames()
        registry = CollectorRegistry()
        registry.register(self)
        with as_config_error(f"logging.prometheus_port={port}", "name another port", OSError):
            self.server, _ = start_http_server(port, "127.0.0.1", registry)

    def collect(self) -> list[Any]:
        """The gauges. The library calls this whenever the page is requested."""
        from prometheus_client.core import GaugeMetricFamily

        return [
            GaugeMetricFamily(self.names[metric], metric, value)
            for metric, value in self.newest_figures.items()
        ]

    def write(self, entry: LogEntry) -> None:
        """Each figure is a gauge, and so is the step."""
        figures = self.newest_figures | entry.figures
        if not entry.is_evaluation:
            figures["step"] = entry.step
        self.names.add(figures)
        # Replaced as a whole: the server reads it from another thread.
        self.newest_figures = figures

    def close(self, failed: bool) -> None:
        """Release the port."""
        self.server.shutdown()
        self.server.server_close()


class SampleDump:
    """All samples of each step and evaluation, one JSON object per line."""

    def __init__(self, folder: Path, find: PromptLookup, decode: Decode | None = None) -> None:
        """`decode`: of the policy's tokenizer; None: rows have no parts."""
        self.folder = folder / SAMPLE_FOLDER
        self.find = find
        self.decode = decode
        self.folder.mkdir(parents=True, exist_ok=True)

    def write(self, entry: LogEntry) -> None:
        """Write samples/step_NNNNNN.jsonl or samples/val_vNNNNNN.jsonl; an entry without samples
        writes nothing."""
        if not entry.samples:
            return
        rows = [self._row(sample) for sample in entry.samples]
        # Without the samples that were dropped, which have no advantages.
        for row, sample, advantages in zip(rows, entry.samples, entry.advantages, strict=False):
            row |= _advantage_stats(advantages[sample.loss_mask])
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        # Moved into place when it is complete, so that a reader never sees half a file.
        temporary = self.folder / ".tmp"
        # "replace": surrogates (half an emoji) cannot be written as UTF-8.
        temporary.write_text(text, encoding="utf-8", errors="replace")
        temporary.replace(self.folder / entry.sample_file)

    def _row(self, sample: Sample) -> dict[str, Any]:
        """A sample as people read it."""
        prompt = self.find(sample.prompt_id)
        versions = set(sample.versions.tolist()) - {NOT_GENERATED}
        row = {
            "prompt_id": sample.prompt_id,
            "index": sample.index,
            "reward": sample.reward if math.isfinite(sample.reward) else None,
            "length": len(sample.response_ids),
            "finish_reason": sample.finish_reason,
            "versions": sorted(versions),
            "ground_truth": prompt and prompt.ground_truth,
            "prompt": prompt and prompt.text,
            "response": sample.response,
        }
        if prompt and prompt.images:
            row["images"] = [self._image_file(image) for image in prompt.images]
        for name, value in sample.extra.items():
            if name not in INTERNAL_EXTRAS:
                row[name] = value
        if self.decode is not None and has_parts(sample):
            # An agent may have written another context than the row's prompt.
            if prompt is None or not np.array_equal(sample.prompt_ids, prompt.ids):
                row["prompt"] = self.decode(sample.prompt_ids)
            row["prompt_length"] = len(sample.prompt_ids)
            row["parts"] = parts_of_sample(sample, self.decode)
        return row

    def _image_file(self, image: bytes) -> str:
        """Write an image once in the run, under a name by its content. Returns the file's path
        below the run folder."""
        ending = media_type(image).removeprefix("image/")
        name = f"{IMAGE_FOLDER}/{hashlib.sha256(image).hexdigest()[:16]}.{ending}"
        path = self.folder / name
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            temporary = self.folder / ".tmp_image"
            temporary.write_bytes(image)
            temporary.replace(path)
        return f"{SAMPLE_FOLDER}/{name}"

    def close(self, failed: bool) -> None:
        """Every file is complete already."""


def _advantage_stats(advantages: np.ndarray) -> dict[str, float | None]:
    """Mean and range over the trained tokens of a sample; None where it has no trained tokens."""
    if not len(advantages):
        return {"advantage/mean": None, "advantage/min": None, "advantage/max": None}
    return {
        "advantage/mean": float(advantages.mean()),
        "advantage/min": float(advantages.min()),
        "advantage/max": float(advantages.max()),
    }


def sample_files(folder: Path, prefix: str) -> dict[int, Path]:
    """The files of samples in a run folder, lowest number first: of its steps by step
    (STEP_PREFIX), or of its evaluations by weight version (EVALUATION_PREFIX)."""
    paths_by_number = {
        path.stem.removeprefix(prefix): path
        for path in (folder / SAMPLE_FOLDER).glob(f"{prefix}*.jsonl")
    }
    return {
        int(number): paths_by_number[number]
        for number in sorted(paths_by_number)
        if number.isdecimal()
    }


class Loggers:
    """All loggers of a run behind one queue and one thread.

    Attributes:
        live: name -> logger, of those that have not failed.
    """

    def __init__(
        self, print_line: Callable[[str], None], started: dict[str, Any] | None = None
    ) -> None:
        """`started`: name -> logger, of those that are running already."""
        self.print_line = print_line
        self.live: dict[str, Any] = dict(started or {})
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="loggers", daemon=True)
        self.thread.start()

    def add(self, name: str, create: Callable[[], Any]) -> None:
        """Create a logger in the thread: TensorBoard's import takes seconds."""

        def create_and_keep() -> None:
            self.live[name] = create()

        self.jobs.put(lambda: self._try(name, create_and_keep))

    def step(self, row: dict[str, Any], batch: Batch) -> None:
        """Write a finished step; returns at once. Neither argument may be changed afterwards."""
        # The row repeats an evaluation, which was written when it ended.
        figures = {
            name: value
            for name, value in row.items()
            if name != "step" and not name.startswith("val/")
        }
        samples = batch.samples + batch.dropped
        entry = LogEntry(_finite(figures), batch.step, False, samples, batch.advantages or [])
        self._put(entry)

    def evaluation(self, metrics: dict[str, float], samples: list[Sample]) -> None:
        """Write an evaluation: its val/ metrics, and its samples (none where an earlier run has
        written them)."""
        self._put(LogEntry(_finite(metrics), int(metrics["val/version"]), True, samples))

    def close(self, failed: bool = False) -> None:
        """Wait until all is written, a minute at most. `failed`: the run ended by an error."""
        self.jobs.put(lambda: self._for_each(lambda logger: logger.close(failed)))
        self.jobs.put(None)
        self.thread.join(CLOSE_TIMEOUT_S)
        if self.thread.is_alive():
            self.print_line(
                f"warning: the loggers have not ended in {CLOSE_TIMEOUT_S:g} s; "
                "some of their data may be missing"
            )

    def _put(self, entry: LogEntry) -> None:
        # Without the limit a disk that hangs would fill the memory with samples.
        if self.jobs.qsize() > MAX_PENDING_JOBS:
            self.print_line(
                f"warning: the loggers are {MAX_PENDING_JOBS} steps behind; "
                f"{entry.sample_file} is left out of them"
            )
            return
        self.jobs.put(lambda: self._for_each(lambda logger: logger.write(entry)))

    def _work(self) -> None:
        for job in iter(self.jobs.get, None):
            job()

    def _for_each(self, call: Callable[[Any], None]) -> None:
        for name, logger in list(self.live.items()):
            self._try(name, lambda logger=logger: call(logger))

    def _try(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:
            self.live.pop(name, None)
            reason = f"{type(error).__name__}: {error}"
            self.print_line(f"warning: {name} failed and is disabled: {reason}")


def _finite(figures: dict[str, Any]) -> dict[str, float]:
    """The finite numbers among them."""
    return {
        name: float(value)
        for name, value in figures.items()
        if isinstance(value, (int, float)) and math.isfinite(value)
    }


def start_remote_loggers(cfg: Config, resumed: bool) -> dict[str, Any]:
    """The loggers that other programs reach, and the user's own: name -> logger. They start before
    anything else is begun.

    Raises:
        ConfigError: W&B is not logged in, the port of Prometheus is taken, or the user's own logger
            does not start.
    """
    started: dict[str, Any] = {}
    if cfg.logging.prometheus_port:
        started["Prometheus"] = Prometheus(cfg.logging.prometheus_port)
    if cfg.logging.wandb:
        started["W&B"] = Wandb(cfg, resumed)
    if cfg.logging.logger:
        started[cfg.logging.logger] = own_logger(cfg)
    return started


def own_logger(cfg: Config) -> Logger:
    """The user's own logger, which `logging.logger` names. Raises ConfigError: it does not exist,
    or does not start."""
    key = "logging.logger"
    create = import_object(key, cfg.logging.logger)
    with as_config_error(f"{key}={cfg.logging.logger}", "fix its __init__"):
        logger = create(cfg)
    missing = [name for name in ("write", "close") if not callable(getattr(logger, name, None))]
    if missing:
        raise ConfigError(
            f"{key}={cfg.logging.logger}: has no method {' and '.join(missing)}; "
            "see docs/how_to/add_a_logger.md"
        )
    return logger


def open_loggers(
    cfg: Config,
    first_step: int,
    find: PromptLookup,
    print_line: Callable[[str], None],
    started: dict[str, Any],
    decode: Decode | None = None,
) -> Loggers:
    """The loggers that the section `logging` asks for. What an earlier run wrote from `first_step`
    on is removed.

    Args:
        started: see `start_remote_loggers`.
        decode: of the policy's tokenizer, for the sample dump.
    """
    folder = Path(cfg.trainer.output_dir)
    for path in _outdated_files(folder, first_step):
        path.unlink()
    loggers = Loggers(print_line, started)
    if cfg.logging.sample_dump:
        loggers.add("the sample dump", lambda: SampleDump(folder, find, decode))
    if cfg.logging.tensorboard:
        config_text = resolved_yaml(cfg)
        loggers.add("TensorBoard", lambda: TensorBoard(folder, config_text, first_step))
    return loggers


def _outdated_files(folder: Path, first_step: int) -> list[Path]:
    """The files of an earlier run in this folder that this run writes again."""
    outdated = []
    if first_step == 0:  # it was another run; on resuming TensorBoard hides what is outdated
        outdated += (folder / "tensorboard").glob("events.out.tfevents.*")
    for step, path in sample_files(folder, STEP_PREFIX).items():
        if step >= first_step:
            outdated.append(path)
    # The weights of the checkpoint were evaluated before it was written.
    first_version = first_step + 1 if first_step > 0 else 0
    for version, path in sample_files(folder, EVALUATION_PREFIX).items():
        if version >= first_version:
            outdated.append(path)
    return outdated
