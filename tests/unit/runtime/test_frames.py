"""How many functions of ours lie between the command and the first step: what a newcomer reads to
get from one to the other."""

from __future__ import annotations

import random
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import one_step_off
from one_step_off.main_ppo import main
from one_step_off.ray_trainer import Pipeline
from one_step_off.runtime import attempts, launch
from tests.bad_input import base
from tests.unit.ray_trainer.stand_ins import World, build

PACKAGE = Path(one_step_off.__file__).parent
MAX_FRAMES = 8


async def done(*_: Any) -> None: ...


async def never(*_: Any) -> bool:
    return False


def test_few_functions_lie_between_the_command_and_the_first_step(models, tmp_path, monkeypatch):
    """`main` and `_step` themselves are not counted, nor are frames of asyncio. Processes and Ray
    are stand-ins; the functions that call them are the real ones."""
    frames: list[str] = []

    async def step(*_: Any) -> None:
        stack = traceback.extract_stack()[:-1]
        frames.extend(frame.name for frame in stack if Path(frame.filename).is_relative_to(PACKAGE))
        raise InterruptedError("far enough")

    async def create_pipeline(*_: Any) -> Pipeline:
        return build(tmp_path / "pipeline", World(random.Random(0)), 2, 1)

    roles = SimpleNamespace(rollout=None, sync=None)
    processes = SimpleNamespace(
        keeps_engines=False,
        engines=None,
        endpoint=None,
        groups={},
        roles=roles,
        setup=done,
        end=done,
        is_process_failure=never,
    )
    monkeypatch.setattr(launch, "start_ray", lambda cfg: "")
    monkeypatch.setattr(attempts, "create_processes", lambda *_: processes)
    monkeypatch.setattr(attempts, "create_pipeline", create_pipeline)
    monkeypatch.setattr(attempts, "log_pools", lambda *_: None)
    monkeypatch.setattr(Pipeline, "_step", step)
    assert main(base(tmp_path, models())) == 1
    assert frames[0] == "main"
    assert len(frames[1:]) <= MAX_FRAMES, frames
