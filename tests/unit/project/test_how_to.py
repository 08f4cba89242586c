"""The pages of docs/how_to/: the code that they show works, from a folder of its own."""

from __future__ import annotations

import asyncio
import io
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from one_step_off.algorithms.advantages import estimate_advantages
from one_step_off.algorithms.config_checks import check_algorithm, check_own_functions
from one_step_off.algorithms.policy_losses import POLICY_LOSSES, LossInputs
from one_step_off.algorithms.trajectories import Trajectories
from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.data.samples import Batch, Prompt
from one_step_off.monitoring.loggers import open_loggers, start_remote_loggers
from one_step_off.monitoring.tracker import Tracker
from one_step_off.rollout.batch_sources import own_source
from tests.unit.ray_trainer.stand_ins import World, build, make_sample

HOW_TO = Path(__file__).parents[3] / "docs" / "how_to"
MODULES = ("my_batches", "my_loss", "my_estimator", "my_logger")


@pytest.fixture
def page(tmp_path, monkeypatch):
    """Writes the module that a page shows into a folder, in which a user would start a run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str) -> None:
        text = (HOW_TO / name).read_text()
        ((module, code),) = re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```$", text, re.M | re.S)
        assert module in MODULES
        Path(f"{module}.py").write_text(code)

    yield write
    for module in MODULES:
        sys.modules.pop(module, None)


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_batch_source(page, tmp_path, staleness):
    page("add_a_batch_source.md")
    world = World(random.Random(0))
    source = "my_batches:LongestFirst"
    pipeline = build(tmp_path / "run", world, 5, staleness, batch_source=source)
    assert type(pipeline.batches).__name__ == "LongestFirst"
    asyncio.run(pipeline.fit())
    assert [trained.step for trained in world.trained] == list(range(5))
    ages = [step - version for step, _, (version,) in world.trained]
    assert max(ages) == staleness
    prompts = [prompt for trained in world.trained for prompt in trained.prompts]
    assert len(set(prompts)) == len(prompts) == 15


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("no_such_name", "use auto, or module:Class"),
        ("my_batches:partial", "is no subclass of"),
        ("one_step_off.rollout.batch_sources:BatchSource", "has no as_batch, complete, "),
    ],
)
def test_what_is_no_batch_source_is_refused(page, spec, message):
    page("add_a_batch_source.md")
    cfg = Config()
    cfg.pipeline.batch_source = spec
    with pytest.raises(ConfigError, match=message):
        own_source(cfg)


def test_a_loss(page):
    page("add_a_loss.md")
    cfg = Config()
    cfg.algorithm.policy_loss = "my_loss:soft_clip"
    cfg.algorithm.policy_loss_kwargs = {"width": 0.3}
    check_algorithm(cfg)
    check_own_functions(cfg)
    log_probs = torch.tensor([-1.0, -1.0, -0.1], requires_grad=True)
    old = torch.tensor([-1.0, -1.1, -3.0])
    advantage = torch.tensor([1.0, -1.0, 1.0])
    inputs = LossInputs(log_probs, old, advantage, torch.zeros(3, dtype=torch.int64), torch.ones(3))
    loss, clipped = POLICY_LOSSES.find(cfg.algorithm.policy_loss).function(inputs, width=0.3)
    loss.sum().backward()
    assert loss[0] == -1.0
    assert clipped.tolist() == [False, False, True]
    assert log_probs.grad[0] == pytest.approx(-1.0)
    assert abs(log_probs.grad[2]) < 1e-3
    cfg.algorithm.policy_loss_kwargs = {"widht": 0.3}
    with pytest.raises(ConfigError, match="no such setting of my_loss:soft_clip.*width"):
        check_own_functions(cfg)


def test_an_estimator(page):
    page("add_an_estimator.md")
    cfg = Config()
    cfg.algorithm.adv_estimator = "my_estimator:above_median"
    cfg.algorithm.adv_kwargs = {"scale": 2.0}
    check_algorithm(cfg)
    check_own_functions(cfg)
    masks = [np.ones(2, bool)] * 3
    batch = Trajectories(np.array([0.0, 1.0, 3.0]), ["a", "a", "a"], masks)
    advantages, returns = estimate_advantages("my_estimator:above_median", batch, scale=2.0)
    assert [values.tolist() for values in advantages] == [[-2, -2], [0, 0], [4, 4]]
    assert returns is None
    cfg.rollout.n = 1
    with pytest.raises(ConfigError, match=r"rollout\.n"):
        check_own_functions(cfg)


def log_two_steps(cfg: Config, folder: Path) -> str:
    """What the user reads."""
    out = io.StringIO()
    tracker = Tracker(str(folder), 2, out=out)
    started = start_remote_loggers(cfg, resumed=False)
    tracker.loggers = open_loggers(cfg, 0, lambda _: None, tracker.log, started)
    prompt = Prompt((0, 0), np.arange(2, dtype=np.int32), "q", "1")
    times = {"time/step_s": 1.0, "time/generate_s": 0.5, "time/train_s": 0.5}
    times |= {"time/wait_rollout_s": 0.0, "time/wait_trainer_s": 0.0, "time/sync_s": 0.0}
    for step in range(2):
        samples = [make_sample(prompt, index, step) for index in range(2)]
        tracker.step(Batch(step, samples, (0, step)), step, dict(times))
    tracker.close()
    return out.getvalue()


def logger_config(folder: Path, spec: str) -> Config:
    cfg = Config()
    cfg.trainer.output_dir = str(folder)
    cfg.logging.tensorboard = False
    cfg.logging.sample_dump = False
    cfg.logging.logger = spec
    return cfg


def test_a_logger(page, tmp_path):
    page("add_a_logger.md")
    log_two_steps(logger_config(tmp_path / "run", "my_logger:RewardsAsCsv"), tmp_path / "run")
    assert (tmp_path / "run" / "rewards.csv").read_text() == "0,0.5\n1,0.5\n"


def test_a_logger_that_fails_is_named_and_the_run_goes_on(page, tmp_path):
    page("add_a_logger.md")
    code = Path("my_logger.py").read_text().replace('"reward/mean"', '"no such metric"')
    Path("my_logger.py").write_text(code)
    cfg = logger_config(tmp_path / "run", "my_logger:RewardsAsCsv")
    text = log_two_steps(cfg, tmp_path / "run")
    assert text.count("warning: my_logger:RewardsAsCsv failed and is disabled: KeyError") == 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("my_logger:NoSuch", "cannot be imported"),
        ("my_logger:Path", "fix its __init__|has no method"),
        ("builtins:list", "fix its __init__|has no method"),
    ],
)
def test_a_logger_that_does_not_start_is_refused(page, tmp_path, spec, message):
    page("add_a_logger.md")
    with pytest.raises(ConfigError, match=message):
        start_remote_loggers(logger_config(tmp_path, spec), resumed=False)
