"""Which split of N GPUs is fastest: python -m one_step_off.plan config=FILE [section.key=value ...] [options]

Without --from and --times it runs a few steps of the config in turns, with the whole batch and with a quarter of it, and
calibrates by those. Each split is then simulated (`simulation.Work` has the model). Generation is taken as decode_s * longest +
sequence_s * tokens / replicas, training as train_fixed_s + train_token_s * tokens / ranks, both fitted to the runs' medians
(one run cannot tell the fixed parts: they are 0), generation then scaled so that the simulation of the first run takes as
long as it did. Response lengths are drawn from those of the run; with --times, evenly up to data.max_response_length.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from one_step_off.config import Config, ConfigError, shares_of
from one_step_off.config_checks import resolved_device, validate
from one_step_off.config_io import load
from one_step_off.main_ppo import exit_code

if TYPE_CHECKING:  # its import takes seconds, and a wrong config is answered before it
    from one_step_off.simulation import Work

WARM_UP, STEPS = 3, 10  # steps of a calibration: dropped, and all
SHOWN, SAMPLES, ANY = 24, 20_000, 1 << 20  # splits at most; samples of one simulation; GPUs where there need be none
CALIBRATION = """pipeline.staleness=0 trainer.total_epochs=null trainer.save_hf_model=false trainer.save_freq=-1 data.val_files=
    trainer.test_freq=-1 trainer.keep_best=null trainer.val_only=false trainer.resume=never data.val_sets={} logging.wandb=false
    logging.tensorboard=false logging.sample_dump=true""".split()  # fmt: skip
AHEAD = "one step off"
ASSUMED = """assumed: {how}; responses of {mean:.0f} tokens, {longest} at most;
  the rest goes by tokens and devices; the sync takes as long for every split, because each replica receives all bytes;
  in the colocated arrangement handing devices over is free"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigError(f"{message}; --help says how to call it")


def devices(cfg: Config) -> tuple[int, int]:
    """Replicas and trainer ranks of a config."""
    rollout, actor = (sum(cfg.placement.pools[cfg.placement.roles[role]]) for role in ("rollout", "actor"))
    return rollout // cfg.rollout.tensor_parallel_size, actor


def fit(fixed: Sequence[float], each: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """The (a, b), neither negative, of the least squares of a * fixed + b * each - seconds; of one point a is 0."""
    x, y = np.stack([fixed, each], 1), np.asarray(seconds)
    a, b = np.linalg.lstsq(x, y)[0] if len(y) > 1 else (-1.0, 0.0)
    alone = x.T @ y / (x * x).sum(0)  # where the other is 0
    return (0.0, float(alone[1])) if a < 0 else (float(alone[0]), 0.0) if b < 0 else (float(a), float(b))


def by_runs(cfg: Config, folders: Sequence[str | Path]) -> tuple["Work", tuple[int, int], float]:
    """What a step of the first of these finished runs in turns takes; its replicas and ranks; and its seconds of generation.
    Raises ConfigError: one is no such run."""
    from one_step_off.simulation import Work

    runs, lengths = [], []
    for folder in map(Path, folders):
        try:
            own = load([f"config={folder / 'config.yaml'}"])
            rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()][WARM_UP:]
            dumps = [path.read_text().splitlines() for path in sorted(folder.glob("samples/step_*.jsonl"))]
            lengths += [json.loads(line)["length"] for dump in dumps if not runs for line in dump]
        except (OSError, ValueError, KeyError, ConfigError) as e:
            raise ConfigError(f"--from {folder}: not a run ({e}); give its trainer.output_dir") from None
        if not rows or not dumps or own.pipeline.staleness or own.rollout.n != cfg.rollout.n:
            needs = f"more than {WARM_UP} steps in turns (pipeline.staleness=0), samples/, and rollout.n={cfg.rollout.n}"
            raise ConfigError(f"--from {folder}: needs {needs}; give another, or leave it out for a calibration")
        median = {k: np.median([r[k] for r in rows]) for k, v in rows[0].items() if isinstance(v, float)}
        runs.append((median, *devices(own), median["actor/tokens_total"] / own.actor.ppo_epochs))
    medians, replicas, ranks, trained = zip(*runs, strict=True)
    made, longest, generate, train, samples, sync, canary = (
        [m[k] for m in medians]
        for k in "tokens/response response_length/max time/wait_rollout_s time/train_s samples time/sync_s time/canary_s".split()
    )
    n, prompt_tokens = cfg.rollout.n, (trained[0] - made[0]) / samples[0]
    drawn = np.array(lengths[: len(lengths) // n * n]).reshape(-1, n)
    decode = fit(longest, np.divide(made, replicas), generate)
    update = fit(np.ones(len(runs)), np.divide(trained, ranks), train)
    work = Work(int(samples[0]) // n, drawn, prompt_tokens, *decode, *update, sync[0], canary[0] / 2)
    return work, (replicas[0], ranks[0]), generate[0]


def by_times(cfg: Config, text: str) -> tuple["Work", tuple[int, int], float]:
    """The same by what is given. Raises ConfigError."""
    from one_step_off.simulation import Work

    try:
        generate, train, sync, tail, *more = [*map(float, text.split(",")), *[0.0] * (text.count(",") == 2)]
        if more or not (0 < generate < 1e9 and 0 < train < 1e9 and 0 <= sync < 1e9 and 0 <= tail <= generate):
            raise ValueError
    except ValueError:
        mend = "three or four numbers, GEN,TRAIN,SYNC[,TAIL] in seconds, as 458,445,6,60 (TAIL: of GEN, 0 if left out)"
        raise ConfigError(f"--times {text}: must be {mend}") from None
    (replicas, ranks), prompts, longest = devices(cfg), cfg.data.train_batch_size, cfg.data.max_response_length
    lengths = np.random.default_rng(0).integers(1, longest + 1, (1024, cfg.rollout.n))
    tokens = prompts * cfg.rollout.n * lengths.mean()
    each = (generate - tail) * replicas / tokens, 0.0, train * ranks / tokens
    return Work(prompts, lengths, 0.0, tail / longest, *each, sync), (replicas, ranks), generate


def calibrate(keys: list[str], cfg: Config, folder: str) -> list[Path]:
    """Run a few steps in turns, of the whole batch and of a quarter of it. Raises RuntimeError: a run failed."""
    quarter, folders = cfg.data.train_batch_size // 4, []
    smaller = [f"data.train_batch_size={quarter}", f"actor.ppo_mini_batch_size={quarter}", "critic.ppo_mini_batch_size=null"]
    for own in ([], smaller) if quarter else ([],):
        folders.append(Path(folder, f"run{len(folders)}"))
        own = [*keys, *CALIBRATION, *own, f"trainer.total_steps={STEPS}", f"trainer.output_dir={folders[-1]}"]
        print(f"calibrating, run {len(folders)}: {STEPS} steps in turns ...", flush=True)
        done = subprocess.run([sys.executable, "-m", "one_step_off.main_ppo", *own], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the calibration ended with {done.returncode}: {done.stderr.strip()[-1000:]}")
    return folders


def compare(cfg: Config, work: "Work", gpus: int) -> list[tuple[str, str, dict[str, Any]]]:
    """(GPUs, arrangement, what `simulate` says) of the colocated arrangement and of every split, in turns and one step off; of
    more than SHOWN splits only some, evenly. Raises ConfigError: there is none."""
    from one_step_off.simulation import simulate

    width, whole = cfg.rollout.tensor_parallel_size, devices(cfg)[1] // shares_of(cfg, "actor")
    splits = [(n, gpus - n) for n in range(width, gpus, width) if (gpus - n) % whole == 0]
    if not splits:
        raise ConfigError(f"--gpus {gpus}: no split has {width} for a replica and {whole} for a trainer; give more")
    splits = [splits[i] for i in sorted({round(i) for i in np.linspace(0, len(splits) - 1, min(SHOWN, len(splits)))})]
    arms = [(f"{gpus}", "colocated, in turns", 0, gpus, 0)] * (width == 1)
    arms += [(f"{a} + {b}", ("in turns", AHEAD)[k], a // width, b, k) for a, b in splits for k in (0, 1)]
    r = cfg.rollout
    seeded = r.seed_samples == "on" or (r.seed_samples == "auto" and resolved_device(cfg) == "cpu")
    how = cfg.weight_sync.overlap, r.routing == "static" or (r.routing == "auto" and seeded)
    steps = int(np.clip(SAMPLES // (work.prompts * r.n), 3, 8))
    return [(label, name, simulate(work, *counts, *how, steps)) for label, name, *counts in arms]


def scaled(work: "Work", shape: tuple[int, int], seconds: float) -> "Work":
    """With generation as fast as makes it last so long on these replicas: `fit` knows nothing of routing and waiting."""
    from one_step_off.simulation import simulate

    factor = seconds / simulate(work, *shape, 0)["median/time/wait_rollout_s"]
    return replace(work, decode_s=work.decode_s * factor, sequence_s=work.sequence_s * factor)


def report(cfg: Config, work: "Work", gpus: int) -> None:
    """Print the table, the best in one line, and what was assumed."""
    found = compare(cfg, work, gpus)
    print(f"{'rollout + trainer':20}{'arrangement':22}step, s   idle: rollout  trainer   samples/s")
    for split, name, r in found:
        idle = f"{r['idle_share/rollout']:12.0%} {r['idle_share/trainer']:8.0%}"
        print(f"{split:20}{name:22}{r['median/time/step_s']:7.4g} {idle} {r['samples_per_s']:11.4g}")
    best = min(found, key=lambda row: row[2]["median/time/step_s"])
    turns = min((row for row in found if row[1] != AHEAD), key=lambda row: row[2]["median/time/step_s"])
    gain = turns[2]["median/time/step_s"] / best[2]["median/time/step_s"]
    over = f", {gain:.2f} times as fast as the best in turns ({turns[1]}, {turns[0]})" if gain > 1 else ""
    print(f"best: {best[1]}, {best[0]}: {best[2]['median/time/step_s']:.4g} s a step{over}")
    fixed = f"{work.decode_s:.3g} s a token whatever the batch, training {work.train_fixed_s:.3g} s whatever the GPUs"
    print(ASSUMED.format(how=f"generation has {fixed}", mean=work.lengths.mean(), longest=work.lengths.max()))


def main(argv: list[str]) -> int:
    """Run the command; returns its exit code (2: bad input)."""
    return exit_code(_main, argv)


def _main(argv: list[str]) -> int:
    parser = _Parser("python -m one_step_off.plan", description=__doc__.split("\n\n")[1], allow_abbrev=False)
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="config=FILE, section.key=value")
    parser.add_argument("--gpus", type=int, help="to share out; default: all of placement.pools")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--from", dest="runs", action="append", help="a finished run in turns; twice: of two batch sizes")
    source.add_argument("--times", metavar="GEN,TRAIN,SYNC[,TAIL]", help="seconds of a step in turns with the config's pools")
    args = parser.parse_args(argv)
    cfg = load(args.keys)
    pools, own = cfg.placement.pools, cfg.placement.roles
    gpus = sum(map(sum, pools.values())) if args.gpus is None else args.gpus
    if not 2 <= gpus <= ANY:
        raise ConfigError(f"--gpus {gpus}: must be a whole number from 2 to {ANY}")
    if args.runs or args.times:  # such a machine need not be here
        cfg.placement.pools = {name: [sum(shape)] for name, shape in pools.items()}
    validate(cfg, ANY if args.runs or args.times else None)
    for role in own.keys() - {"rollout", "actor"}:
        if own[role] != own["actor"]:
            raise ConfigError(f"placement.roles.{role}={own[role]}: only two pools are planned; put it into the actor's")
    with tempfile.TemporaryDirectory() as folder:
        found = by_times(cfg, args.times) if args.times else by_runs(cfg, args.runs or calibrate(args.keys, cfg, folder))
    minis = cfg.data.train_batch_size // cfg.actor.ppo_mini_batch_size * cfg.actor.ppo_epochs
    places = min(cfg.agent.max_concurrency, cfg.rollout.engine_kwargs.get("max_num_seqs", 256))
    work = scaled(replace(found[0], before_step=1 / minis, places=places), *found[1:])
    report(cfg, replace(work, prompts=cfg.data.train_batch_size), gpus)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
