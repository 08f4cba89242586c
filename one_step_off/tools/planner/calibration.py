"""The constants of `work.Work`, fitted to synchronous runs or to given times.

    generation = decode_s * longest + sequence_s * tokens / replicas
    training   = train_fixed_s + train_token_s * tokens / ranks

They are fitted to the medians of the runs (with a single run the fixed parts are almost zero), then
scaled so that a simulation of the first run takes as long as it did. Response lengths are drawn
from those of the first run; with given times those of a prompt are spread evenly up to
data.max_response_length.
"""

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import load_config
from one_step_off.config.placement import devices_of_pool, resolved_device
from one_step_off.config.schema import Config
from one_step_off.tools.planner.measured_sync import (
    MeasuredSync,
    measured_sync,
    median,
    rows_of_run,
)
from one_step_off.tools.planner.work import Work

STEPS = 10
"""All steps of a calibrating run."""

CALIBRATION_KEYS = (
    "pipeline.staleness=0",
    "placement.lend=false",
    "weight_sync.in_flight=wait",
    "trainer.total_epochs=null",
    "trainer.save_hf_model=false",
    "trainer.save_freq=-1",
    "data.val_files=",
    "trainer.test_freq=-1",
    "trainer.keep_best=null",
    "trainer.val_only=false",
    "trainer.resume=never",
    "data.val_sets={}",
    "logging.wandb=false",
    "logging.tensorboard=false",
    "logging.sample_dump=true",
    f"trainer.total_steps={STEPS}",
)

MAX_TIME_S = 1e9


@dataclass(frozen=True)
class Measured:
    """A synchronous run: its devices, and medians over its steps.

    Attributes:
        replicas, ranks: of rollout and trainer.
        epochs: ppo_epochs.
        response_tokens: of all responses of a step.
        longest: tokens of the longest response.
        generate_s: seconds of generation.
        train_s: seconds of training.
        trained_tokens: tokens of prompts and responses, times epochs.
        samples: of a step.
        sync: the weight sync.
    """

    replicas: int
    ranks: int
    epochs: int
    response_tokens: float
    longest: float
    generate_s: float
    train_s: float
    trained_tokens: float
    samples: float
    sync: MeasuredSync


def devices(cfg: Config) -> tuple[int, int]:
    """Replicas and trainer ranks of a config."""
    roles = cfg.placement.roles
    rollout_devices = devices_of_pool(cfg, roles["rollout"])
    ranks = devices_of_pool(cfg, roles["actor"])
    return rollout_devices // cfg.rollout.tensor_parallel_size, ranks


def run_calibration(keys: list[str], cfg: Config, folder: str) -> list[str]:
    """Run a few synchronous steps, of the whole batch and of a quarter; returns the runs' folders.

    Raises:
        SystemExit: a run failed.
    """
    runs: list[list[str]] = [[]]
    quarter = cfg.data.train_batch_size // 4
    if quarter:
        runs.append(
            [
                f"data.train_batch_size={quarter}",
                f"actor.ppo_mini_batch_size={quarter}",
                "critic.ppo_mini_batch_size=null",
            ]
        )
    folders = []
    for number, batch_keys in enumerate(runs):
        run_folder = f"{folder}/{number}"
        print(f"calibrating: run {number + 1}, {STEPS} synchronous steps ...", flush=True)
        arguments = [*keys, *CALIBRATION_KEYS, *batch_keys, f"trainer.output_dir={run_folder}"]
        command = [sys.executable, "-m", "one_step_off.main_ppo", *arguments]
        finished = subprocess.run(command, capture_output=True, text=True)
        if finished.returncode:
            last_output = finished.stderr.strip()[-1000:]
            raise SystemExit(
                f"error: the calibration ended with {finished.returncode}: {last_output}"
            )
        folders.append(run_folder)
    return folders


def by_runs(folders: list[str]) -> Work:
    """The `Work` of the first of these finished synchronous runs.

    Raises:
        ConfigError: one is no such run.
    """
    runs = []
    lengths = np.zeros((0, 0), int)
    for folder in folders:
        try:
            cfg = load_config([f"config={folder}/config.yaml"])
            if not runs:
                lengths = _response_lengths(Path(folder), cfg.rollout.n)
            runs.append(_measured(Path(folder), cfg))
        except (OSError, ValueError, KeyError, TypeError, ConfigError) as e:
            raise ConfigError(
                f"--from {folder}: is not the trainer.output_dir of a synchronous run: {e}; "
                "name the folder of a finished run with pipeline.staleness=0"
            ) from None
    return fit_work(runs, lengths)


def lines_of_runs(folders: list[str]) -> list[str]:
    """What finished runs were measured on, for people: a line each."""
    lines = []
    for folder in folders:
        cfg = load_config([f"config={folder}/config.yaml"])
        lines.append(f"measured: {folder}, model.path={cfg.model.path}, on {_gpus(cfg)}")
    return [*lines, f"response lengths are drawn from those of {folders[0]}"]


def lines_of_times(cfg: Config, text: str) -> list[str]:
    """What given times are taken for: a line each."""
    longest = cfg.data.max_response_length
    return [
        f"--times {text}: seconds measured on {_gpus(cfg)}, by placement.pools",
        f"response lengths are spread evenly up to data.max_response_length={longest}",
    ]


def _gpus(cfg: Config) -> str:
    """The devices of a config by what they do."""
    replicas, ranks = devices(cfg)
    kind = "processes" if resolved_device(cfg) == "cpu" else "GPUs"
    rollout = replicas * cfg.rollout.tensor_parallel_size
    if cfg.placement.roles["rollout"] == cfg.placement.roles["actor"]:
        return f"{ranks} of the {kind}, for both rollout and trainer"
    return f"{rollout} + {ranks} {kind} (rollout + trainer)"


def _response_lengths(folder: Path, n: int) -> np.ndarray:
    """The dumped samples' response lengths in tokens, int [groups, n]; those of an episode's
    segments are added up. Raises ValueError: too few."""
    lengths = []
    for path in sorted(folder.glob("samples/step_*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if (row.get("segment") or {}).get("index"):  # it follows the one before
                lengths[-1] += row["length"]
            else:
                lengths.append(row["length"])
    if len(lengths) < n:
        raise ValueError("it has no samples/, see logging.sample_dump")
    groups = len(lengths) // n
    return np.array(lengths[: groups * n]).reshape(groups, n)


def _measured(folder: Path, cfg: Config) -> Measured:
    if cfg.pipeline.staleness:
        raise ValueError(f"it has pipeline.staleness={cfg.pipeline.staleness}, not 0")
    rows = rows_of_run(folder)
    generate_s = median(rows, "time/wait_rollout_s")
    replicas, ranks = devices(cfg)
    return Measured(
        replicas=replicas,
        ranks=ranks,
        epochs=cfg.actor.ppo_epochs,
        response_tokens=median(rows, "tokens/response"),
        longest=median(rows, "response_length/max"),
        generate_s=generate_s,
        train_s=median(rows, "time/train_s"),
        trained_tokens=median(rows, "actor/tokens_total"),
        samples=median(rows, "samples"),
        sync=measured_sync(rows),
    )


def by_times(cfg: Config, text: str) -> Work:
    """The `Work` of GEN,TRAIN,SYNC[,TAIL], the seconds of a synchronous step with the
    config's pools.

    Raises:
        ConfigError: the text is not of this form.
    """
    try:
        generate, train, sync, tail = _parse_times(text)
    except ValueError:
        raise ConfigError(
            f"--times {text}: must be GEN,TRAIN,SYNC[,TAIL] in seconds, TAIL at most GEN "
            "(the part of GEN in which only the longest response runs), such as 458,445,6,60"
        ) from None
    n = cfg.rollout.n
    longest = cfg.data.max_response_length
    samples = cfg.data.train_batch_size * n
    lengths = np.linspace(longest / n, longest, n).round().astype(int)[None]
    tokens = cfg.data.train_batch_size * lengths.sum()
    replicas, ranks = devices(cfg)
    whole_sync = MeasuredSync(sync)
    step = Measured(
        replicas, ranks, 1, tokens, longest, generate, train, tokens, samples, whole_sync
    )
    # The longest response alone, without training.
    alone = Measured(replicas, ranks, 1, 0, longest, tail, 0, 0, 0, MeasuredSync(0))
    return fit_work([step, alone], lengths)


def _parse_times(text: str) -> tuple[float, float, float, float]:
    """Generation, training, sync and tail in seconds. Raises ValueError."""
    times = [float(part) for part in text.split(",")]
    if len(times) == 3:
        times.append(0.0)
    generate, train, sync, tail = times
    in_range = 0 < generate < MAX_TIME_S and 0 < train < MAX_TIME_S
    if not in_range or not 0 <= sync < MAX_TIME_S or not 0 <= tail <= generate:
        raise ValueError
    return generate, train, sync, tail


def fit_work(runs: list[Measured], lengths: np.ndarray) -> Work:
    """The `Work` of the first of some synchronous runs.

    Args:
        runs: the run to fit; further runs, of other batch sizes, separate the fixed parts.
        lengths: response lengths of the first run, int [groups, n].
    """
    from one_step_off.tools.planner.simulation import simulate

    first = runs[0]
    decode_s, sequence_s = _fit_generation(runs)
    train_fixed_s, train_token_s = _fit_training(runs)
    prompt_tokens = (first.trained_tokens / first.epochs - first.response_tokens) / first.samples
    work = Work(
        prompts=round(first.samples / lengths.shape[1]),
        lengths=lengths,
        prompt_tokens=prompt_tokens,
        decode_s=decode_s,
        sequence_s=sequence_s,
        train_fixed_s=train_fixed_s,
        train_token_s=train_token_s,
        sync_s=first.sync.sync_s,
        canary_s=first.sync.canary_s,
        replica_canary_s=first.sync.replica_canary_s,
    )
    # The fit does not know routing and places; scaled, generation takes as long as it did.
    simulated = simulate(work, first.replicas, first.ranks, staleness=0)
    factor = first.generate_s / simulated["median/time/wait_rollout_s"]
    return replace(work, decode_s=work.decode_s * factor, sequence_s=work.sequence_s * factor)


def _fit_generation(runs: list[Measured]) -> tuple[float, float]:
    """decode_s and sequence_s."""
    rows = [[run.longest, run.response_tokens / run.replicas] for run in runs]
    decode_s, sequence_s = _least_squares(rows, [run.generate_s for run in runs])
    return float(decode_s), float(sequence_s)


def _fit_training(runs: list[Measured]) -> tuple[float, float]:
    """train_fixed_s and train_token_s, scaled so that the first run's training is met."""
    rows = [[1.0, run.trained_tokens / run.epochs / run.ranks] for run in runs]
    coefficients = _least_squares(rows, [run.train_s for run in runs])
    # Clipping may have moved the fit.
    coefficients *= runs[0].train_s / (np.array(rows[0]) @ coefficients)
    fixed_s, token_s = coefficients.tolist()
    return fixed_s, token_s


def _least_squares(rows: list[list[float]], values: list[float]) -> np.ndarray:
    """Coefficients [2] without negative ones: noise is no part of a phase."""
    solution = np.linalg.lstsq(np.array(rows, float), np.array(values, float))[0]
    return solution.round(12).clip(0)
