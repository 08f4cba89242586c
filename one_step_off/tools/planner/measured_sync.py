"""The weight sync of a calibrating run, and what it becomes with the settings of the plan.

A run measures its sync with its own settings. Where the plan sends adapters alone and the run sent
the model, or the other way round, the part that depends on the bytes is scaled.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from one_step_off.config.errors import ConfigError, as_config_error
from one_step_off.config.loading import load_config
from one_step_off.config.lora_checks import sends_adapters
from one_step_off.config.schema import Config
from one_step_off.tools.planner.work import Work
from one_step_off.weight_sync.report import RECEIVER_PHASES

WARM_UP = 3
"""The first steps of a calibrating run, which are left out."""

Row = Mapping[str, float]

BYTES_OF_DTYPE = {"float32": 4, "bfloat16": 2}
"""By model.dtype."""

PHASES_WITHOUT_BYTES = ("pause",)
"""Of a vLLM worker's phases those that take as long for any number of bytes."""


@dataclass(frozen=True)
class MeasuredSync:
    """Medians over the syncs of a run; the defaults are those of a run that measured no parts.

    Attributes:
        sync_s: seconds, both halves of the canary included.
        canary_s: of it the trainer's half of the canary.
        replica_canary_s: of it the replicas' half.
        bytes_s: of it the slowest worker's phases that depend on the bytes.
        full_bytes: of all weights that are sent, or of all adapters.
    """

    sync_s: float
    canary_s: float = 0.0
    replica_canary_s: float = 0.0
    bytes_s: float = 0.0
    full_bytes: float = math.nan


def median(rows: Sequence[Row], name: str) -> float:
    """The median of a metric. Raises KeyError: a step lacks it."""
    return float(np.median([row[name] for row in rows]))


def rows_of_run(folder: Path) -> list[Row]:
    """The metrics of a run's steps after the warm-up. Raises ValueError: it has too few."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines][WARM_UP:]
    if not rows:
        raise ValueError(f"it has {len(lines)} steps; more than {WARM_UP} are needed")
    return rows


def measured_sync(rows: Sequence[Row]) -> MeasuredSync:
    """The sync of a synchronous run. `rows`: metrics of its steps. Raises KeyError: a step lacks a
    metric that every run has."""
    sync_s = median(rows, "time/sync_s")
    canary_s = median(rows, "time/canary_s") / 2  # the other half is the replicas'
    # The canary cannot take longer than the sync that contains it.
    parts = MeasuredSync(sync_s, canary_s, min(canary_s, max(0.0, sync_s - canary_s)))
    if any("sync/full_bytes" not in row for row in rows):
        return parts
    transfer_s = sync_s - canary_s - parts.replica_canary_s
    phases = [name for name in RECEIVER_PHASES if name not in PHASES_WITHOUT_BYTES]
    bytes_s = sum(median(rows, f"sync/{name}_s") for name in phases)
    return replace(
        parts,
        bytes_s=min(bytes_s, transfer_s),
        full_bytes=median(rows, "sync/full_bytes"),
    )


def with_settings_of_plan(work: Work, folder: str, cfg: Config) -> tuple[Work, list[str]]:
    """The work of a step with the plan's `weight_sync` settings.

    Args:
        work: calibrated by runs.
        folder: of the run that its sync comes from.
        cfg: the plan's config.

    Returns:
        The work, and a line for each assumption.

    Raises:
        ConfigError: the sync of other weights than the run's cannot be computed.
    """
    run_cfg = load_config([f"config={folder}/config.yaml"])
    sync = measured_sync(rows_of_run(Path(folder)))
    if not _sends_something_else(run_cfg, cfg):
        return work, []
    return _scaled_by_bytes(work, sync, folder, cfg)


def assumptions_of_given_times(cfg: Config) -> list[str]:
    """What is assumed of a sync of which only the whole is given: a line for each assumption."""
    if sends_adapters(cfg):
        return ["weight_sync.lora=adapter: GEN and SYNC are taken as those of adapters alone"]
    return []


def _sends_something_else(run_cfg: Config, cfg: Config) -> bool:
    """Whether the run sent other weights than the plan will."""
    if sends_adapters(run_cfg) != sends_adapters(cfg):
        return True
    of_run = (run_cfg.model.lora_rank, run_cfg.model.lora_target_modules)
    of_plan = (cfg.model.lora_rank, cfg.model.lora_target_modules)
    return sends_adapters(cfg) and of_run != of_plan


def _scaled_by_bytes(
    work: Work, sync: MeasuredSync, folder: str, cfg: Config
) -> tuple[Work, list[str]]:
    """The part of the transfer that depends on the bytes, for the bytes of the plan."""
    if math.isnan(sync.full_bytes):
        raise ConfigError(
            f"--from {folder}: it sent other weights than weight_sync.lora={cfg.weight_sync.lora} "
            "will, and its metrics have no sync/full_bytes; name a run with the plan's "
            "weight_sync.lora and model.lora_rank"
        )
    planned_bytes = sent_bytes(cfg)
    ratio = planned_bytes / sync.full_bytes
    planned = replace(work, sync_s=work.sync_s + sync.bytes_s * (ratio - 1))
    planned_mb = _megabytes(planned_bytes)
    measured_mb = _megabytes(sync.full_bytes)
    lines = [
        f"weight_sync.lora={cfg.weight_sync.lora}: {planned_mb} are sent, {measured_mb} in the run",
        f"  of its transfer of {work.transfer_s:.3g} s, {sync.bytes_s:.3g} s depend on the bytes: "
        f"{planned.transfer_s:.3g} s are counted",
        "  generation and training are taken as the run's; adapters alone make tokens slower",
    ]
    if ratio > 1:
        lines.append("  more bytes than were measured: the sync may be far from this")
    return planned, lines


def _megabytes(count: float) -> str:
    """A number of bytes, for a message."""
    megabytes = count / 1e6
    if megabytes < 100:
        return f"{megabytes:.3g} MB"
    return f"{megabytes:,.0f} MB"


def sent_bytes(cfg: Config) -> int:
    """Bytes of a full sync: of the adapters where they are sent alone, else of the model.

    Raises:
        ConfigError: the model's shapes cannot be read.
    """
    from one_step_off.models import hf_model, tiny_qwen  # transformers: slow to import
    from one_step_off.models.adapted_layers import adapted_layers

    path = cfg.model.path
    fix = "name a run with the plan's weight_sync.lora"
    with as_config_error(f"model.path={path}: its shapes cannot be read", fix):
        if path.startswith("tiny:"):
            path = tiny_qwen.ensure(path)
        named = replace(cfg, model=replace(cfg.model, path=path))
        model = hf_model.empty_model(named, "actor", None, None)
    if not sends_adapters(cfg):
        numbers = sum(parameter.numel() for parameter in model.parameters())
    else:
        names = adapted_layers(model, cfg.model.lora_target_modules)
        layers = [model.get_submodule(name) for name in names]
        sides = sum(layer.in_features + layer.out_features for layer in layers)
        numbers = cfg.model.lora_rank * sides
    return numbers * BYTES_OF_DTYPE[cfg.model.dtype]
