"""Save and resume. A checkpoint of step N holds everything from which the run goes on as if it had never stopped.

That is the trainer at v(N) and, one step off, the finished samples of step N (made with v(N-1), which no longer exist
anywhere) and the data position after them: both are there after these samples have come and before v(N) is sent.

    checkpoints/step_000006/
        state.json        step, version, data position, evaluation not yet in a row; the keys it depends on
        samples.npz       per-token arrays of all samples, one after the other, and their lengths
        samples.jsonl     the rest of each sample
        actor/ ...        of each role that learns: weights and optimiser, by torch's distributed checkpoint or Megatron's
        actor_rank_0.pt ... RNG state of each of its ranks

It is written beside its place and renamed, so it is there whole or not at all.
"""

import json
import os
import shutil
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from one_step_off.config import Config, ConfigError, settings_of
from one_step_off.samples import Sample

ARRAYS = {"prompt_ids": "i4", "response_ids": "i4", "log_probs": "f4", "loss_mask": "?", "versions": "i4"}
REST = tuple(f.name for f in fields(Sample) if f.name not in ARRAYS)

# A resumed run must make the same batches of the same age; what may change (lr, total_steps, save_freq) is not here.
FIXED_KEYS = ("pipeline.staleness", "rollout.n", "data.train_batch_size", "trainer.seed", "model.dtype", "agent.loop")


def fixed_keys(cfg: Config) -> dict[str, Any]:
    """The values that a resumed run must share with its checkpoint; the back ends cannot read each other's."""
    learning = (role for role in ("actor", "critic") if role in cfg.placement.roles)
    backends = {f"{role}.backend": settings_of(cfg, role).backend for role in learning}
    return {key: attrgetter(key)(cfg) for key in FIXED_KEYS} | backends


def folder_of(cfg: Config) -> Path:
    """Where a run's checkpoints lie."""
    return Path(cfg.trainer.output_dir) / "checkpoints"


def finished(folder: Path) -> list[Path]:
    """All checkpoints, oldest first. What is still being written, or was cut off, has another name."""
    found = (p for p in folder.glob("step_*") if p.name[5:].isdecimal() and p.is_dir())
    return sorted(found, key=lambda p: int(p.name[5:]))


def find(cfg: Config) -> Path | None:
    """The checkpoint that `trainer.resume` means, or None to start anew. Raises ConfigError: a path that is no
    checkpoint, or one made with other settings."""
    wish = cfg.trainer.resume
    found = {"auto": finished(folder_of(cfg)), "never": []}.get(wish, [Path(wish)])
    if not found:
        return None
    path = found[-1]
    made_with = read_state(path)["fixed"]
    for key, value in fixed_keys(cfg).items():
        if made_with.get(key, value) != value:
            mend = "resume with that value, or start anew with trainer.resume=never or another trainer.output_dir"
            raise ConfigError(f"{key}={value}: the checkpoint {path} was made with {made_with[key]}; {mend}")
    return path


def read_state(path: Path) -> dict[str, Any]:
    """`state.json`. Raises ConfigError if it cannot be read."""
    try:
        return json.loads((path / "state.json").read_text())
    except (OSError, ValueError) as e:
        mend = "name a folder as OUTPUT_DIR/checkpoints/step_000050 in trainer.resume, or use auto or never"
        raise ConfigError(f"checkpoint {path}: state.json cannot be read ({e}); {mend}") from e


def write_samples(samples: list[Sample], folder: Path) -> None:
    """`samples.npz` and `samples.jsonl`."""
    arrays = {name: np.concatenate([getattr(s, name) for s in samples]).astype(d) for name, d in ARRAYS.items()}
    for name in ("prompt", "response"):
        arrays[f"{name}_lengths"] = np.array([len(getattr(s, f"{name}_ids")) for s in samples])
    np.savez(folder / "samples.npz", **arrays)
    rows = (json.dumps({name: getattr(s, name) for name in REST}) + "\n" for s in samples)
    (folder / "samples.jsonl").write_text("".join(rows))


def read_samples(folder: Path) -> list[Sample]:
    """The samples that `write_samples` wrote, equal bit for bit."""
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    with np.load(folder / "samples.npz", allow_pickle=False) as arrays:
        for name in ARRAYS:
            ends = np.cumsum(arrays["prompt_lengths" if name == "prompt_ids" else "response_lengths"])
            for row, part in zip(rows, np.split(arrays[name], ends[:-1]), strict=True):
                row[name] = part
    return [Sample(**row | {"prompt_id": tuple(row["prompt_id"])}) for row in rows]


class Checkpointer:
    """Writes checkpoints of one run and keeps the last `trainer.keep_checkpoints` of them."""

    def __init__(self, cfg: Config, save_trainer: Any) -> None:
        """`save_trainer`: async (path) -> None, by which the trainer group writes its part."""
        self.cfg, self.save_trainer, self.folder = cfg, save_trainer, folder_of(cfg)
        self.newest: Path | None = None  # what it wrote last

    def is_due(self, step: int) -> bool:
        """Every `trainer.save_freq` steps; the start of a run needs no checkpoint."""
        freq = self.cfg.trainer.save_freq
        return freq > 0 and step > 0 and step % freq == 0

    @property
    def in_use(self) -> bool:
        """Whether this run writes checkpoints, or has; then its end is one too, or it would be resumed from before."""
        return self.cfg.trainer.save_freq > 0 or bool(finished(self.folder))

    async def save(self, step: int, samples: list[Sample] | None, state: dict[str, Any]) -> Path:
        """Write the checkpoint of `step`; `samples` None where none are in flight. Returns its folder."""
        target = self.folder / f"step_{step:06d}"
        work = self.folder / f".{target.name}.unfinished"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True)
        await self.save_trainer(str(work.resolve()))
        if samples is not None:
            write_samples(samples, work)
        whole = {"step": step, "has_samples": samples is not None, "fixed": fixed_keys(self.cfg)} | state
        (work / "state.json").write_text(json.dumps(whole, indent=2) + "\n")
        shutil.rmtree(target, ignore_errors=True)
        os.rename(work, target)
        self.newest = target
        for old in finished(self.folder)[: -self.cfg.trainer.keep_checkpoints]:
            shutil.rmtree(old)
        return target
