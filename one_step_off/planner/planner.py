"""Which split of N GPUs is fastest: python -m one_step_off.plan config=FILE [section.key=value ...] [options]

Without --from and --times it runs a few steps of the config in turns, with the whole batch and with a quarter of it, and
calibrates by those. Then it simulates every split: `simulation.Work` says by which model. Its decode_s (a token) and
sequence_s, train_fixed_s and train_token_s are fitted to the medians of the runs, as generation = decode_s * longest +
sequence_s * tokens / replicas and training = train_fixed_s + train_token_s * tokens / ranks (of one run the fixed parts are
next to nothing), then scaled so that a simulation of the first run takes as long as it did. Response lengths are drawn from
those of the first run; with --times those of a prompt are spread evenly up to data.max_response_length.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import load_config
from one_step_off.config.placement import resolved_device
from one_step_off.config.roles import data_parallel_size
from one_step_off.config.schema import Config
from one_step_off.runtime.validation import validate

WARM_UP, STEPS = 3, 10  # steps of a calibration: dropped, and all
SHOWN, SAMPLES, ANY = (
    24,
    20_000,
    1 << 20,
)  # splits at most; samples of one simulation; GPUs where there need be none
ALONE = """pipeline.staleness=0 pipeline.partial_rollout=false rollout.oversample=1 trainer.total_epochs=null trainer.save_hf_model=false trainer.save_freq=-1 data.val_files=
    trainer.test_freq=-1 trainer.keep_best=null trainer.val_only=false trainer.resume=never data.val_sets={} logging.wandb=false
    logging.tensorboard=false logging.sample_dump=true""".split() + [f"trainer.total_steps={STEPS}"]  # fmt: skip
USED = """tokens/response response_length/max time/wait_rollout_s time/train_s actor/tokens_total samples time/sync_s
    time/canary_s""".split()
STEP, AHEAD = "median/time/step_s", "one step off"
TABLE = "{:20}{:22}{:>7}{:>15}{:>9}{:>12}"
ASSUMED = """assumed: {0.decode_s:.3g} s for a token, {0.sequence_s:.3g} s more for each sequence beside it; training
  {0.train_fixed_s:.3g} s however many GPUs, and {0.train_token_s:.3g} s a token and GPU; sync {0.sync_s:.3g} s on every split;
  responses of {1:.0f} tokens, {2} at most; in the colocated arrangement devices change hands at once"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigError(f"{message}; --help says how to call it")


def devices(cfg: Config) -> tuple[int, int]:
    """Replicas and trainer ranks of a config."""
    rollout, actor = (
        sum(cfg.placement.pools[cfg.placement.roles[role]]) for role in ("rollout", "actor")
    )
    return rollout // cfg.rollout.tensor_parallel_size, actor


def calibrate(keys: list[str], cfg: Config, folder: str) -> list[str]:
    """Run a few steps in turns, of the whole batch and of a quarter; returns the runs' folders. Raises SystemExit: one failed."""
    few, folders = cfg.data.train_batch_size // 4, []
    smaller = [
        f"data.train_batch_size={few}",
        f"actor.ppo_mini_batch_size={few}",
        "critic.ppo_mini_batch_size=null",
    ]
    for own in ([], smaller)[: 1 + bool(few)]:
        folders.append(f"{folder}/{len(folders)}")
        print(f"calibrating: run {len(folders)}, {STEPS} steps in turns ...", flush=True)
        own = [*keys, *ALONE, *own, f"trainer.output_dir={folders[-1]}"]
        done = subprocess.run(
            [sys.executable, "-m", "one_step_off.main_ppo", *own], capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(
                f"error: the calibration ended with {done.returncode}: {done.stderr.strip()[-1000:]}"
            )
    return folders


def by_runs(folders: list[str]) -> Any:
    """The `simulation.Work` of the first of these finished runs in turns. Raises ConfigError: one is no such run."""
    rows, lengths, n = [], [], 0
    for folder in map(Path, folders):
        try:
            own = load_config([f"config={folder / 'config.yaml'}"])
            steps = [
                json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
            ][WARM_UP:]
            dumps = [] if rows else sorted(folder.glob("samples/step_*.jsonl"))
            lengths += [
                json.loads(line)["length"]
                for path in dumps
                for line in path.read_text().splitlines()
            ]
            n = n or own.rollout.n
            if not steps or len(lengths) < n or own.pipeline.staleness:
                raise ValueError(
                    f"wanted are more than {WARM_UP} steps, samples/ and pipeline.staleness=0"
                )
            rows.append(
                (
                    *devices(own),
                    own.actor.ppo_epochs,
                    *(np.median([row[k] for row in steps]) for k in USED),
                )
            )
        except (OSError, ValueError, KeyError, TypeError, ConfigError) as e:
            raise ConfigError(
                f"--from {folder}: is no trainer.output_dir of a run in turns: {e}"
            ) from None
    return fitted(rows, np.array(lengths[: len(lengths) // n * n]).reshape(-1, n))


def by_times(cfg: Config, text: str) -> Any:
    """The same by GEN,TRAIN,SYNC[,TAIL], the seconds of a step in turns with the config's pools. Raises ConfigError."""
    try:
        generate, train, sync, tail = map(float, (text + ",0" * (text.count(",") == 2)).split(","))
        if not (
            0 < generate < 1e9 and 0 < train < 1e9 and 0 <= sync < 1e9 and 0 <= tail <= generate
        ):
            raise ValueError
    except ValueError:
        mend = "GEN,TRAIN,SYNC[,TAIL] in seconds, TAIL at most GEN (what the longest response takes alone), as 458,445,6,60"
        raise ConfigError(f"--times {text}: must be {mend}") from None
    n, longest, counts = cfg.rollout.n, cfg.data.max_response_length, (*devices(cfg), 1)
    lengths = np.linspace(longest / n, longest, n).round().astype(int)[None]
    samples, tokens = cfg.data.train_batch_size * n, cfg.data.train_batch_size * lengths.sum()
    whole = *counts, tokens, longest, generate, train, tokens, samples, sync, 0
    tail_alone = *counts, 0, longest, tail, 0, 0, 0, 0, 0
    return fitted([whole, tail_alone], lengths)


def fitted(rows: list[tuple[float, ...]], lengths: np.ndarray) -> Any:
    """The `simulation.Work` of the first of some runs in turns; a row is of one: replicas, ranks, passes, and what USED names."""
    from one_step_off.planner.simulation import Work, simulate

    replicas, ranks, epochs, made, longest, generate, train, trained, samples, sync, canary = (
        np.array(rows, float).T
    )
    x = np.stack([np.ones(len(rows)), trained / epochs / ranks], 1)
    fits = (np.stack([longest, made / replicas], 1), generate), (x, train)
    decode, update = (
        np.linalg.lstsq(*fit)[0].round(12).clip(0) for fit in fits
    )  # noise is no part of a phase
    update *= train[0] / (x[0] @ update)  # where something was clipped
    prompts, prompt_tokens = (
        round(samples[0] / lengths.shape[1]),
        (trained[0] / epochs[0] - made[0]) / samples[0],
    )
    half = canary[0] / 2  # the other one is the replicas'
    work = Work(prompts, lengths, prompt_tokens, *decode.tolist(), *update.tolist(), sync[0], half)
    # The fit knows nothing of routing and of places: generation is to take as long as it did.
    factor = (
        generate[0]
        / simulate(work, int(replicas[0]), int(ranks[0]), 0)["median/time/wait_rollout_s"]
    )
    return replace(work, decode_s=work.decode_s * factor, sequence_s=work.sequence_s * factor)


def compare(cfg: Config, work: Any, gpus: int) -> list[tuple[str, str, dict[str, Any]]]:
    """(GPUs, arrangement, what `simulate` says) of the colocated arrangement and of every split, in turns and one step off; of
    more than SHOWN splits only some, evenly. Raises ConfigError: there is none."""
    from one_step_off.planner.simulation import simulate

    r, width, whole = (
        cfg.rollout,
        cfg.rollout.tensor_parallel_size,
        devices(cfg)[1] // data_parallel_size(cfg, "actor"),
    )

    def trains(ranks: int) -> bool:
        return ranks % whole == 0 and ranks // whole <= cfg.actor.ppo_mini_batch_size * r.n

    splits = [(n, gpus - n) for n in range(width, gpus, width) if trains(gpus - n)]
    if not splits:
        needs = f"{width} for a replica, {whole} for a model that trains, and a sample for each of those; give another number"
        raise ConfigError(f"--gpus {gpus}: no split has {needs}")
    splits = [splits[round(i)] for i in np.linspace(0, len(splits) - 1, min(SHOWN, len(splits)))]
    arms = [(f"{gpus}", "colocated, in turns", 0, gpus, 0)] * (width == 1 and trains(gpus))
    arms += [
        (f"{a} + {b}", ("in turns", AHEAD)[k], a // width, b, k) for a, b in splits for k in (0, 1)
    ]
    seeded = r.seed_samples == "on" or (r.seed_samples == "auto" and resolved_device(cfg) == "cpu")
    how = cfg.weight_sync.overlap, r.routing == "static" or (r.routing == "auto" and seeded)
    steps = int(np.clip(SAMPLES // (work.prompts * r.n), 3, 8))
    return [(label, name, simulate(work, *counts, *how, steps)) for label, name, *counts in arms]


def report(work: Any, found: list[tuple[str, str, dict[str, Any]]]) -> None:
    """Print what was assumed, the table, and the best in one line."""
    print(ASSUMED.format(work, work.lengths.mean(), work.lengths.max()))
    print(
        TABLE.format(
            "rollout + trainer", "arrangement", "step, s", "idle: rollout", "trainer", "samples/s"
        )
    )
    for label, name, r in found:
        idle = (f"{r[f'idle_share/{role}']:.0%}" for role in ("rollout", "trainer"))
        print(TABLE.format(label, name, f"{r[STEP]:.4g}", *idle, f"{r['samples_per_s']:.4g}"))
    ranked = sorted(
        found, key=lambda row: float(f"{row[2][STEP]:.4g}")
    )  # as shown: of equal ones the first
    (where, name, r), turns = ranked[0], next(row for row in ranked if row[1] != AHEAD)
    print(
        f"best: {name}, {where}: {r[STEP]:.4g} s a step; in turns at best {turns[2][STEP]:.4g} s ({turns[0]})"
    )


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code. Raises ConfigError: bad input."""
    parser = _Parser(
        "python -m one_step_off.plan", description=__doc__.partition("\n\n")[2], allow_abbrev=False
    )
    parser.add_argument(
        "keys", nargs="*", metavar="KEY=VALUE", help="config=FILE, section.key=value"
    )
    parser.add_argument("--gpus", type=int, help="to share out; default: all of placement.pools")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--from", dest="runs", action="append", help="a run in turns; twice: of two batch sizes"
    )
    source.add_argument(
        "--times", metavar="GEN,TRAIN,SYNC[,TAIL]", help="seconds of a step in turns on those pools"
    )
    args = parser.parse_intermixed_args(argv)
    cfg, given = load_config(args.keys), bool(args.runs or args.times)
    pools, where = cfg.placement.pools, cfg.placement.roles
    gpus = sum(map(sum, pools.values())) if args.gpus is None else args.gpus
    if not 2 <= gpus <= ANY:
        raise ConfigError(f"--gpus {gpus}: must be a whole number from 2 to {ANY}")
    if given:  # the machine may be any
        cfg.placement.pools = {name: [sum(shape)] for name, shape in pools.items()}
    validate(cfg, ANY if given else None)
    for role in (
        role for role, pool in where.items() if role != "rollout" and pool != where["actor"]
    ):
        raise ConfigError(
            f"placement.roles.{role}={where[role]}: only two pools are planned; put it into the actor's"
        )
    with tempfile.TemporaryDirectory() as folder:
        work = (
            by_times(cfg, args.times)
            if args.times
            else by_runs(args.runs or calibrate(args.keys, cfg, folder))
        )
    minis = cfg.data.train_batch_size // cfg.actor.ppo_mini_batch_size * cfg.actor.ppo_epochs
    most = cfg.rollout.engine_kwargs.get("max_num_seqs", 256)
    if type(most) is not int or most < 1:
        raise ConfigError(
            f"rollout.engine_kwargs.max_num_seqs={most}: must be a whole number above 0"
        )
    places = min(cfg.agent.max_concurrency, most)
    work = replace(work, places=places, prompts=cfg.data.train_batch_size, before_step=1 / minis)
    report(work, compare(cfg, work, gpus))
    return 0
