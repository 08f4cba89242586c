"""Save and resume. A checkpoint of step N holds everything from which the run goes on as if it had never stopped.

That is the trainer at v(N) and, one step off, the finished samples of step N (made with v(N-1), which no longer exist
anywhere) and the data position after them: both are there after these samples have come and before v(N) is sent.

    checkpoints/step_000006/
        state.json        step, incarnation, data position, evaluation not yet in a row; the keys it depends on
        samples.npz       per-token arrays of all samples, one after the other, and their lengths
        samples.jsonl     the rest of each sample
        actor/ ...        of each role that learns: weights and optimiser, by torch's distributed checkpoint or Megatron's
        actor_rank_0.npz  counters and RNG state of each of its ranks
        manifest.json     format, size and checksum (XXH3-128) of every other file, name and shape of every parameter

It is written beside its place and renamed, so it is there whole or not at all: the trainers copy their state and go on,
and write while they train. Before a run goes on from it every file is compared with the manifest, and no pickle is read
but with the few classes that belong there (`safe_reading.py`).
"""

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from one_step_off.config.schema import (
    Config,
    ConfigError,
    as_config_error,
    first_line,
    role_settings,
)
from one_step_off.data.samples import TRAINER_FIELDS, Batch, Sample

FORMAT = 2  # of what is described above; 1 had no manifest
MANIFEST = "manifest.json"
TRAINED = ("actor", "critic")
ARRAYS = {
    "prompt_ids": "i4",
    "response_ids": "i4",
    "log_probs": "f4",
    "loss_mask": "?",
    "versions": "i4",
}
REST = tuple(f.name for f in fields(Sample) if f.name not in ARRAYS)

# A resumed run must make the same batches of the same age; what may change (lr, total_steps, save_freq) is not here.
FIXED_KEYS = """pipeline.staleness pipeline.partial_rollout rollout.n trainer.seed data.train_batch_size agent.loop
    model.dtype model.lora_rank model.lora_alpha model.lora_target_modules""".split()


def fixed_keys(cfg: Config) -> dict[str, Any]:
    """The values that a resumed run must share with its checkpoint; the back ends cannot read each other's. How long samples may
    be carried counts where they are."""
    backends = {
        f"{role}.backend": role_settings(cfg, role).backend
        for role in TRAINED
        if role in cfg.placement.roles
    }
    keys = FIXED_KEYS + ["pipeline.max_carry"] * cfg.pipeline.partial_rollout
    return {key: attrgetter(key)(cfg) for key in keys} | backends


def empty_models(cfg: Config) -> dict[str, Any]:
    """Of the roles that learn, by the models' code without weights; {} if that fails."""
    from one_step_off.training import fsdp_model  # torch and transformers: slow to import

    try:
        return {
            role: fsdp_model.empty(cfg, role, None, None)
            for role in TRAINED
            if role in cfg.placement.roles
        }
    except Exception:  # code of others; the trainer says in its own words what does not fit
        return {}


def shapes(cfg: Config) -> dict[str, list[int]]:
    """Of every parameter of the roles that learn; {} if they are not known."""
    return {
        f"{role}: {name}": [*p.shape]
        for role, m in empty_models(cfg).items()
        for name, p in m.named_parameters()
    }


def folder_of(cfg: Config) -> Path:
    """Where a run's checkpoints lie."""
    return Path(cfg.trainer.output_dir) / "checkpoints"


def finished(folder: Path) -> list[Path]:
    """All checkpoints, oldest first. What is still being written, or was cut off, has another name."""
    found = (p for p in folder.glob("step_*") if p.name[5:].isdecimal() and p.is_dir())
    return sorted(found, key=lambda p: int(p.name[5:]))


def put_aside(cfg: Config, past: Path | None) -> None:
    """Before a run begins at the checkpoint `past` (None: anew): what is not of its own past goes to checkpoints/earlier,
    in place of what was there, so that nothing takes it for this run's."""
    own, aside = finished(folder_of(cfg)), folder_of(cfg) / "earlier"
    if past is not None and past.resolve().parent == folder_of(cfg).resolve():
        own = [path for path in own if path.name > past.name]
    if own:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
    for path in reversed(own):  # if this is killed, those that are left are of one past
        path.rename(aside / path.name)


def find(cfg: Config, say: Callable[[str], None] = lambda line: None) -> Path | None:
    """The checkpoint that `trainer.resume` means, or None to start anew; every file of it has been verified. With "auto"
    the newest good one: `say` is told of those passed over. Raises ConfigError: it is no good, or none is, or it was
    made with other settings."""
    wish, anew = (
        cfg.trainer.resume,
        "start anew with trainer.resume=never trainer.overwrite=true or another trainer.output_dir",
    )
    found = {"auto": finished(folder_of(cfg))[::-1], "never": []}.get(wish, [Path(wish)])
    model = shapes(cfg) if found else {}
    for path in found:
        if fault := fault_of(path, model):
            if path == found[-1]:
                raise ConfigError(
                    f"trainer.resume={wish}: checkpoint {path}: {fault}; name a good one, or {anew}"
                )
            say(f"warning: checkpoint {path}: {fault}; the one before it is taken")
            continue
        made_with = read_state(path)["fixed"]
        for key, value in fixed_keys(cfg).items():
            if (made := made_with.get(key, "none")) != value:
                raise ConfigError(
                    f"{key}={value}: checkpoint {path} was made with {made}; resume with it, or {anew}"
                )
        return path
    return None


def read_state(path: Path) -> dict[str, Any]:
    """`state.json`, of a checkpoint that has been verified."""
    return json.loads((path / "state.json").read_text())


def sealed(path: Path) -> dict[str, dict[str, Any]]:
    """Bytes and XXH3-128 of every file but the manifest."""
    files = {
        p.relative_to(path).as_posix(): p
        for p in path.rglob("*")
        if p.is_file() and p.name != MANIFEST
    }

    def checksum(file: Path) -> str:
        with open(file, "rb") as f:
            return hashlib.file_digest(f, xxhash.xxh3_128).hexdigest()

    with ThreadPoolExecutor(8) as pool:
        checksums = dict(zip(files, pool.map(checksum, files.values()), strict=True))
    return {"bytes": {name: p.stat().st_size for name, p in files.items()}, "checksum": checksums}


def fault_of(path: Path, model: dict[str, list[int]]) -> str | None:
    """What is wrong with a checkpoint, whatever the settings: which file differs from the manifest, or which parameter
    from `model`, where both are known (see `shapes`); or which holds a pickle that has no place there."""
    from one_step_off.models import safe_unpickling as safe_reading

    at = MANIFEST
    try:
        at, manifest = "its files", json.loads((path / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            return f"it has format {manifest['format']}, and this version of one_step_off reads {FORMAT}"
        for kind, now in (sealed(path) | {"shape": manifest["shape"] and model}).items():
            then = manifest[kind] if now else {}
            for at in sorted(n for n in now.keys() | then.keys() if now.get(n) != then.get(n)):
                return f"{at}: its {kind}: {now.get(at, 'none')}, but {then.get(at, 'none')} when it was written"
        for at in (name for name in manifest["bytes"] if name.endswith(".metadata")):
            safe_reading.check(str(path / at))
    except Exception as e:  # broken bytes end in errors of any kind
        return f"{at}: {type(e).__name__}: {first_line(e)}"
    return None


def write_samples(samples: list[Sample], folder: Path) -> None:
    """`samples.npz` and `samples.jsonl`."""
    arrays = {
        name: np.concatenate([getattr(s, name) for s in samples]).astype(d)
        for name, d in ARRAYS.items()
    }
    arrays |= {
        f"{n}_lengths": np.array([len(getattr(s, f"{n}_ids")) for s in samples])
        for n in ("prompt", "response")
    }
    np.savez(folder / "samples.npz", **arrays)
    rows = (json.dumps({name: getattr(s, name) for name in REST}) + "\n" for s in samples)
    (folder / "samples.jsonl").write_text("".join(rows))


def read_samples(folder: Path) -> list[Sample]:
    """The samples that `write_samples` wrote, equal bit for bit."""
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    with np.load(folder / "samples.npz", allow_pickle=False) as arrays:
        for name in ARRAYS:
            ends = np.cumsum(
                arrays["prompt_lengths" if name == "prompt_ids" else "response_lengths"]
            )
            for row, part in zip(rows, np.split(arrays[name], ends[:-1]), strict=True):
                row[name] = part
    return [Sample(**row | {"prompt_id": tuple(row["prompt_id"])}) for row in rows]


def write_batch(batch: Batch, folder: Path) -> None:
    """What an update takes: the samples, and in `batch.npz` what goes with each of their tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    write_samples(batch.samples, folder)
    found = {
        name: np.concatenate(getattr(batch, name))
        for name in TRAINER_FIELDS
        if getattr(batch, name) is not None
    }
    np.savez(
        folder / "batch.npz",
        stamp=(batch.step, *batch.expected_stamp, batch.max_version_lag),
        **found,
    )


def read_batch(folder: Path) -> Batch:
    """What `write_batch` wrote, equal bit for bit. Raises ConfigError: there is none, or it is torn."""
    mend = "name a folder as OUTPUT_DIR/skipped/step_000012"
    with as_config_error(
        f"--replay {folder}: no batch", mend
    ):  # broken bytes end in errors of any kind
        samples, arrays = (
            read_samples(folder),
            dict(np.load(folder / "batch.npz", allow_pickle=False)),
        )
        (step, *expected, older), ends = (
            arrays.pop("stamp").tolist(),
            np.cumsum([len(s.response_ids) for s in samples]),
        )
        columns = {name: np.split(array, ends[:-1]) for name, array in arrays.items()}
        return Batch(step, samples, tuple(expected), older, **columns)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


class Checkpointer:
    """Writes checkpoints of one run. The last `trainer.keep_checkpoints` stay, and the best by `trainer.keep_best`."""

    def __init__(self, cfg: Config, save_trainer: Callable[[str], Awaitable[Awaitable]]) -> None:
        """`save_trainer`: async (path) -> awaitable. When it returns the trainers have copied their part; when the
        answer has been awaited, it is written."""
        self.cfg, self.save_trainer, self.folder, self.model = (
            cfg,
            save_trainer,
            folder_of(cfg),
            shapes(cfg),
        )

    def is_due(self, step: int) -> bool:
        """Every `trainer.save_freq` steps; the start of a run needs no checkpoint."""
        return (
            self.cfg.trainer.save_freq > 0 and step > 0 and step % self.cfg.trainer.save_freq == 0
        )

    def has(self, step: int) -> bool:
        """Whether there is one of this step. It is this run's: see `put_aside`."""
        return (self.folder / f"step_{step:06d}").exists()

    @property
    def in_use(self) -> bool:
        """Whether this run writes checkpoints, or has; then its end is one too, or it would be resumed from before."""
        return self.cfg.trainer.save_freq > 0 or bool(finished(self.folder))

    async def save(
        self, step: int, samples: list[Sample] | None, state: dict[str, Any]
    ) -> Awaitable[tuple[Path, int]]:
        """Take the checkpoint of `step`; `samples` None where none are in flight. The run may go on when this returns.
        The answer, awaited, is its folder and its bytes: then it is whole and on the disk."""
        work = self.folder / f".step_{step:06d}.unfinished"
        for left in self.folder.glob(".step_*"):
            shutil.rmtree(left, ignore_errors=True)
        work.mkdir(parents=True)
        whole = {"step": step, "has_samples": samples is not None, "fixed": fixed_keys(self.cfg)}
        (work / "state.json").write_text(json.dumps(whole | state, indent=2) + "\n")
        # The samples now: the step that is about to begin changes them.
        own = asyncio.to_thread(write_samples, samples, work) if samples else asyncio.sleep(0)
        writing, _ = await asyncio.gather(self.save_trainer(str(work.resolve())), own)
        best = self.cfg.trainer.keep_best
        scores = {
            f"step_{e['val/version']:06.0f}": e[best]
            for e in state.get("evaluations", ())
            if best in e
        }

        async def finish() -> tuple[Path, int]:
            await writing
            return await asyncio.to_thread(self._commit, work, scores)

        return finish()

    def _commit(self, work: Path, scores: dict[str, float]) -> tuple[Path, int]:
        """Everything onto the disk, then the rename; then remove what need not stay. `scores`: by folder."""
        manifest = {"format": FORMAT, "shape": self.model} | sealed(work)
        (work / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
        for path in (*work.rglob("*"), work):
            _sync(path)
        target = self.folder / work.stem[1:]
        work.rename(target)
        _sync(self.folder)
        there = finished(self.folder)
        best = sorted((p for p in there if p.name in scores), key=lambda p: scores[p.name])[-1:]
        for old in {*there} - {*there[-self.cfg.trainer.keep_checkpoints :], *best}:
            shutil.rmtree(old, ignore_errors=True)
        return target, sum(manifest["bytes"].values())
