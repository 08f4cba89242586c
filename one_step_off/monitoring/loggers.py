"""What a run writes for other eyes than programs': TensorBoard, Weights & Biases, Prometheus, and the samples
themselves.

All of it happens in one thread beside the pipeline. A logger that fails is named once and left out from then on: a
broken dashboard must not end a run of days. A logger has the methods close(failed) and
write(figures, at, name, samples, advantages): the finite figures of step `at`, or of an evaluation (then `at` is its
"val/version"); the samples behind them and the name of the file for these, with advantages (none for an evaluation).
"""

import json
import math
import queue
import re
import secrets
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from one_step_off.config.loading import parse_yaml, resolved_yaml
from one_step_off.config.schema import Config, as_config_error
from one_step_off.data.samples import NOT_GENERATED, Batch, PromptLookup, Sample

SAMPLES, STEP, VAL = "samples", "step_", "val_v"
_PATIENCE_S = 60.0
_QUEUE = 32


class TensorBoard:
    """Event files in tensorboard/. Held-out figures stand at the version that was evaluated."""

    def __init__(self, folder: Path, config_text: str, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # What an earlier run in this folder wrote from here on is hidden.
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)
        self.writer.add_text("config", "    " + config_text.replace("\n", "\n    "), first_step)

    def write(self, figures: dict[str, float], at: int, *_: Any) -> None:
        """Each figure is a scalar."""
        for name, value in figures.items():
            self.writer.add_scalar(name, value, at)
        self.writer.flush()

    def close(self, failed: bool) -> None:
        """Write what is left."""
        self.writer.close()


class Wandb:
    """One W&B run per run folder: its id stands in `wandb_run_id`, and a resumed run goes on in it. `link`: where it can
    be seen."""

    def __init__(self, cfg: Config, resumed: bool) -> None:
        """Raises ConfigError if W&B does not start (not logged in, say). Not `resumed`: another run, another id."""
        import wandb

        folder, offline = Path(cfg.trainer.output_dir), cfg.logging.wandb_mode == "offline"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "wandb_run_id"
        run_id = file.read_text().strip() if resumed and file.exists() else secrets.token_hex(4)
        settings = wandb.Settings(silent=True, console="off")
        mend = "run `wandb login`, or set logging.wandb_mode=offline"
        with as_config_error("logging.wandb=true: W&B does not start", mend):
            wandb.setup(
                settings=settings
            )  # W&B would ask at a terminal for a login, in the middle of the bar
            # Offline there is nothing to ask; runs of one id become one when they are sent.
            how = {
                "id": run_id,
                "resume": None if offline else "allow",
                "mode": cfg.logging.wandb_mode,
            }
            where = {
                "project": cfg.logging.wandb_project,
                "name": folder.resolve().name,
                "dir": str(folder),
            }
            self.run = wandb.init(
                config=parse_yaml(resolved_yaml(cfg))[0], settings=settings, **how, **where
            )
        file.write_text(run_id + "\n")
        # Asking an offline run for its address makes W&B warn.
        self.link = f"offline, in {folder / 'wandb'}" if offline else self.run.url
        # Our own steps, not W&B's: those only count upwards, and a resumed run may start before the last row.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        self.run.define_metric("val/*", step_metric="val/version")

    def write(self, figures: dict[str, float], at: int, *_: Any) -> None:
        """One row of figures."""
        self.run.log(figures if "val/version" in figures else figures | {"step": at})

    def close(self, failed: bool) -> None:
        """Send what is left."""
        self.run.finish(exit_code=int(failed))


class Prometheus:
    """The newest figures as gauges at http://127.0.0.1:PORT/metrics: "reward/mean" is one_step_off_reward_mean."""

    def __init__(self, port: int) -> None:
        """Raises ConfigError: the port is not to be had."""
        from prometheus_client import CollectorRegistry, start_http_server

        self.newest, registry = {}, CollectorRegistry()
        registry.register(self)
        with as_config_error(f"logging.prometheus_port={port}", "name another port", OSError):
            self.server, _ = start_http_server(port, "127.0.0.1", registry)

    def collect(self) -> list[Any]:
        """What the library asks for whenever the page is."""
        from prometheus_client.core import GaugeMetricFamily

        return [
            GaugeMetricFamily("one_step_off_" + re.sub(r"\W", "_", k), k, x)
            for k, x in self.newest.items()
        ]

    def write(self, figures: dict[str, float], at: int, *_: Any) -> None:
        """Each figure is a gauge, and so is the step."""
        self.newest = self.newest | figures | ({} if "val/version" in figures else {"step": at})

    def close(self, failed: bool) -> None:
        """Give the port back."""
        self.server.shutdown()
        self.server.server_close()


def started_first(cfg: Config, resumed: bool) -> dict[str, Any]:
    """The loggers that may refuse, by ConfigError: made before anything else is begun."""
    served = {"Prometheus": Prometheus(port)} if (port := cfg.logging.prometheus_port) else {}
    return served | ({"W&B": Wandb(cfg, resumed)} if cfg.logging.wandb else {})


class SampleDump:
    """All samples of each step and evaluation, one JSON object per line."""

    def __init__(self, folder: Path, find: PromptLookup) -> None:
        self.folder, self.find = folder / SAMPLES, find
        self.folder.mkdir(parents=True, exist_ok=True)

    def write(
        self, _: Any, at: int, name: str, samples: list[Sample], advantages: list[Any]
    ) -> None:
        """samples/`name`; nothing where an evaluation was an earlier run's, whose samples are there already."""
        rows = [self._row(sample) for sample in samples]
        for row, sample, advantage in zip(rows, samples, advantages, strict=False):
            own = advantage[sample.loss_mask]  # of the trained tokens: one value, or one for each
            row |= {
                f"advantage/{f}": float(getattr(own, f)()) if len(own) else None
                for f in ("mean", "min", "max")
            }
        if rows:
            # Surrogates (half an emoji) cannot be UTF-8. And a reader never sees half a file.
            text, temporary = (
                "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows),
                self.folder / ".tmp",
            )
            temporary.write_text(text, encoding="utf-8", errors="replace")
            temporary.replace(self.folder / name)

    def _row(self, sample: Sample) -> dict[str, Any]:
        """A sample as people read it."""
        prompt, row = (
            self.find(sample.prompt_id),
            {n: getattr(sample, n) for n in ("prompt_id", "index")},
        )
        row |= {
            "reward": sample.reward if math.isfinite(sample.reward) else None,
            "length": len(sample.response_ids),
        }
        row |= {
            "finish_reason": sample.finish_reason,
            "versions": sorted(set(sample.versions.tolist()) - {NOT_GENERATED}),
        }
        row |= {"ground_truth": prompt and prompt.ground_truth, "prompt": prompt and prompt.text}
        row["response"] = sample.response
        return row | {
            name: value
            for name, value in sample.extra.items()
            if name not in ("greedy", "replaces")
        }

    def close(self, failed: bool) -> None:
        """Every file is whole already."""


def numbered(folder: Path, kind: str) -> dict[int, Path]:
    """A run's files of samples: of its steps (STEP), or of its evaluations (VAL) by weight version; lowest first."""
    files = {
        path.stem.removeprefix(kind): path for path in (folder / SAMPLES).glob(f"{kind}*.jsonl")
    }
    return {int(stem): files[stem] for stem in sorted(files) if stem.isdecimal()}


class Loggers:
    """All loggers of a run behind one queue and one thread."""

    def __init__(self, say: Callable[[str], None], started: Any = ()) -> None:
        self.say, self.live = say, dict(started)
        self.jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, name="loggers", daemon=True)
        self.thread.start()

    def add(self, what: str, make: Callable[[], Any]) -> None:
        """Make a logger in the thread: TensorBoard's import takes seconds."""
        self.jobs.put(lambda: self._try(what, lambda: self.live.update({what: make()})))

    def step(self, row: dict[str, Any], batch: Batch) -> None:
        """Tell all of a finished step; returns at once. Neither argument may be changed afterwards."""
        # An evaluation was told of when it ended, and stands in the row of the step that ended next.
        own = {
            name: value
            for name, value in row.items()
            if name != "step" and not name.startswith("val/")
        }
        told = batch.samples + batch.dropped
        self._put(own, row["step"], f"{STEP}{batch.step:06d}.jsonl", told, batch.advantages or [])

    def evaluation(self, figures: dict[str, float], samples: list[Sample]) -> None:
        """Tell all of an evaluation (its val/ figures, and its samples: none if an earlier run has them)."""
        version = int(figures["val/version"])
        self._put(figures, version, f"{VAL}{version:06d}.jsonl", samples, [])

    def close(self, failed: bool = False) -> None:
        """Wait until all is written, a minute at most. `failed`: the run ended by an error."""
        self.jobs.put(lambda: self._tell(lambda logger: logger.close(failed)))
        self.jobs.put(None)
        self.thread.join(_PATIENCE_S)
        if self.thread.is_alive():
            self.say(
                f"warning: the loggers have not ended in {_PATIENCE_S:g} s; some of their data may be missing"
            )

    def _put(
        self, figures: dict[str, Any], at: int, name: str, *samples_and_advantages: list[Any]
    ) -> None:
        if self.jobs.qsize() > _QUEUE:  # or a disk that hangs would fill the memory with samples
            self.say(f"warning: the loggers are {_QUEUE} steps behind; {name} is left out of them")
            return
        finite = {
            k: float(v)
            for k, v in figures.items()
            if isinstance(v, (int, float)) and math.isfinite(v)
        }
        self.jobs.put(
            lambda: self._tell(
                lambda logger: logger.write(finite, at, name, *samples_and_advantages)
            )
        )

    def _work(self) -> None:
        for job in iter(self.jobs.get, None):
            job()

    def _tell(self, call: Callable[[Any], None]) -> None:
        for what, logger in list(self.live.items()):
            self._try(what, partial(call, logger))

    def _try(self, what: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as e:
            self.live.pop(what, None)
            self.say(f"warning: {what} failed and is left out from now on: {type(e).__name__}: {e}")


def open_loggers(
    cfg: Config, first_step: int, find: PromptLookup, say: Callable[[str], None], started: dict
) -> Loggers:
    """The loggers that the section `logging` asks for. Samples of an earlier run go from `first_step` on; at step 0
    also its event files, for it was another run. `started`: see `started_first`."""
    folder = Path(cfg.trainer.output_dir)
    gone = [] if first_step else list((folder / "tensorboard").glob("events.out.tfevents.*"))
    for kind, keep in ((STEP, first_step), (VAL, first_step + (first_step > 0))):
        gone += [path for number, path in numbered(folder, kind).items() if number >= keep]
    for path in gone:
        path.unlink()
    loggers = Loggers(say, started)
    if cfg.logging.sample_dump:
        loggers.add("the sample dump", lambda: SampleDump(folder, find))
    if cfg.logging.tensorboard:
        loggers.add("TensorBoard", lambda: TensorBoard(folder, resolved_yaml(cfg), first_step))
    return loggers
