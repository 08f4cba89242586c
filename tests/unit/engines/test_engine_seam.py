"""Engines beside vLLM: how a run finds one, what it refuses, and the one that
docs/how_to/add_an_engine.md shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.data.samples import Prompt
from one_step_off.engines import engine as seam
from one_step_off.engines.engine import Engine, find_engine
from one_step_off.rollout.reward_queue import RewardQueue
from one_step_off.rollout.sampling import Sampling
from one_step_off.runtime import prepare
from one_step_off.runtime.validation import validate
from one_step_off.tools.gpu_check.checks.engines import ReplicaWithSender
from tests.conftest import tiny_config
from tests.unit.rollout.stand_ins import FakeScorer

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "how_to" / "add_an_engine.md"
OWN = "my_engine:OneAtATime"
TOLERANCE = 1e-5  # nats; the same model in float32, with other shapes of batches


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, with the engine that the page shows."""
    (block,) = re.findall(r"^```python\n# my_engine.py\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    (tmp_path / "my_engine.py").write_text(block)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_engine", raising=False)
    return tmp_path


def config(models: Any, folder: Path, **changes: Any) -> Config:
    cfg = tiny_config(models(), str(folder / "run"), **{"rollout.engine": OWN, **changes})
    return cfg


def log_probs_of(model: Any, ids: np.ndarray) -> np.ndarray:
    """Of every token but the first."""
    tokens = torch.tensor(ids).long()
    with torch.no_grad():
        rows = model(tokens[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    return rows.gather(1, tokens[1:, None])[:, 0].numpy()


# ---- finding one ---------------------------------------------------------------------------------


def test_a_name_that_nobody_has_is_refused_with_the_names_that_are() -> None:
    cfg = Config()
    cfg.rollout.engine = "nonsense"
    problem = "rollout.engine='nonsense': unknown; use module:Class or one of vllm, transformers"
    with pytest.raises(ConfigError, match=problem):
        validate(cfg, 0, machine=False)
    with pytest.raises(ConfigError, match=problem):
        find_engine("nonsense")


def test_a_module_without_that_class_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean my_engine:OneAtATime"):
        find_engine("my_engine:OneAtATimes")
    (folder / "my_engine_2.py").write_text("engine = 3\n")
    with pytest.raises(ConfigError, match="is a int, not callable; name a class"):
        find_engine("my_engine_2:engine")


def public_methods(interface: Any) -> set[str]:
    methods = {name for name, member in vars(interface).items() if callable(member)}
    return {name for name in methods if not name.startswith("_")}


def test_the_engines_have_every_method_of_the_interface() -> None:
    methods = public_methods(Engine)
    assert len(methods) > 10
    assert methods <= set(dir(find_engine("transformers")))
    assert methods | public_methods(seam.ServesAgents) <= set(dir(find_engine("vllm")))


# ---- what it refuses -----------------------------------------------------------------------------


def test_the_engines_own_check_is_called_where_a_run_is_prepared(models: Any, folder: Path) -> None:
    prepare.check_models_and_engine(config(models, folder))
    cfg = config(models, folder, **{"rollout.val_top_p": 0.9})
    with pytest.raises(ConfigError, match="rollout.val_top_p=0.9: this engine needs 1.0"):
        prepare.check_models_and_engine(cfg)


@pytest.mark.parametrize("spec", [OWN, "transformers"])
def test_router_replay_needs_an_engine_that_returns_experts(spec: str, folder: Path) -> None:
    cfg = Config()
    cfg.rollout.engine = spec
    cfg.rollout.replay_routing = True
    message = f"rollout.replay_routing=true: rollout.engine={spec} does not return the experts"
    with pytest.raises(ConfigError, match=message):
        seam.check(cfg)


@pytest.mark.parametrize("key", ["rollout.quantization", "rollout.kv_cache_dtype"])
@pytest.mark.parametrize("spec", [OWN, "transformers"])
def test_quantized_rollouts_need_an_engine_that_knows_them(
    spec: str, key: str, folder: Path
) -> None:
    cfg = Config()
    cfg.rollout.engine = spec
    setattr(cfg.rollout, key.removeprefix("rollout."), "fp8")
    problem = (
        f"{key}=fp8: rollout.engine={spec} quantizes nothing; remove it, or use rollout.engine=vllm"
    )
    with pytest.raises(ConfigError, match=problem):
        seam.check(cfg)


@pytest.mark.parametrize("spec", [OWN, "transformers"])
def test_speculation_needs_an_engine_that_speculates(spec: str, folder: Path) -> None:
    cfg = Config()
    cfg.rollout.engine = spec
    cfg.rollout.speculation = "ngram"
    with pytest.raises(ConfigError, match=f"^rollout.speculation='?ngram.*{spec} proposes no"):
        seam.check(cfg)


def test_external_agents_need_an_engine_that_serves_them(folder: Path) -> None:
    cfg = Config()
    seam.check_agents(cfg, "external")
    cfg.rollout.engine = OWN
    problem = f"agent.loop=external: rollout.engine={OWN} serves no external agents; use rollout."
    with pytest.raises(ConfigError, match=problem):
        seam.check_agents(cfg, "external")


def test_vllm_is_refused_where_it_is_not_installed(
    models: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    cfg = config(models, folder, **{"rollout.engine": "vllm"})
    with pytest.raises(ConfigError, match="rollout.engine=vllm: vLLM is not installed"):
        prepare.check_models_and_engine(cfg)
    cfg = config(models, folder, **{"teacher.backend": "vllm", "teacher.path": models(seed=1)})
    cfg.placement.pools = {"rollout": [1], "actor": [1], "teacher": [1]}
    cfg.placement.roles |= {"teacher": "teacher"}
    with pytest.raises(ConfigError, match="teacher.backend=vllm: vLLM is not installed"):
        prepare.check_models_and_engine(cfg)


WITHOUT_VLLM = """
import sys
sys.modules["vllm"] = None  # an import of it raises
from one_step_off.config.loading import load_config
from one_step_off.rollout.replica import RolloutReplica
from one_step_off.runtime import launch, processes
from one_step_off.runtime.prepare import prepare
from one_step_off.runtime.validation import validate
import asyncio, gc
gc.freeze = lambda: None

cfg = load_config(sys.argv[1:])
validate(cfg, 0)
inputs = prepare(cfg, print)
replica = RolloutReplica(cfg, 0, "cpu", [], loops=inputs.loop_names)

async def main():
    await replica.start()
    await replica.engine.resume((0, 3))
    generated = await replica._generate(inputs.canary[0], 4, 7, sampling)
    print("versions", generated.versions.tolist())
    await replica.stop()

from one_step_off.rollout.sampling import Sampling
sampling = Sampling(1, 1.0, None)
asyncio.run(main())
"""


@pytest.mark.parametrize("spec", [OWN, "transformers"])
def test_another_engine_needs_no_vllm(spec: str, models: Any, folder: Path) -> None:
    argv = [f"config={ROOT}/config/gsm8k_tiny_cpu.yaml", f"rollout.engine={spec}"]
    argv += [f"model.path={models()}", f"trainer.output_dir={folder}/run"]
    argv += ["rollout.sampling_kwargs={}", "data.generator_size=64", "data.val_size=8"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_VLLM, *argv],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{folder}"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    versions = done.stdout.splitlines()[-1]
    assert re.fullmatch(r"versions \[3(, 3)*\]", versions), done.stdout


# ---- a replica with the page's engine, or with the reference engine ------------------------------


@pytest.fixture(params=[OWN, "transformers"])
def connected(
    models: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> tuple[ReplicaWithSender, Any]:
    """A replica with that engine, the sender that brings it weights, and the model whose weights
    these are. The engine has loaded others."""
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr("gc.freeze", lambda: None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    sent = AutoModelForCausalLM.from_pretrained(models(seed=1), dtype=torch.float32).eval()
    weights = {name: tensor.detach() for name, tensor in sent.named_parameters()}
    cfg = config(models, folder, **{"rollout.engine": request.param})
    return ReplicaWithSender(cfg, "cpu", weights), sent


def test_an_engine_follows_the_weights_of_the_trainer(connected: Any) -> None:
    replica, sent = connected
    ids = np.arange(3, 23, dtype=np.int32)
    assert np.abs(replica.score([ids])[0] - log_probs_of(sent, ids)).max() > 0.01
    for version in range(2):
        report = replica.sync(version)
        assert report["bytes"] > 1e5
        assert np.abs(replica.score([ids])[0] - log_probs_of(sent, ids)).max() < TOLERANCE
        with torch.no_grad():
            for tensor in sent.parameters():
                tensor.mul_(1.3)
    assert np.abs(replica.score([ids])[0] - log_probs_of(sent, ids)).max() > 0.01


def test_an_engine_makes_samples_with_version_and_log_probs(connected: Any) -> None:
    fed, sent = connected
    replica = fed.replica
    replica.rewards = RewardQueue([FakeScorer()], 0)
    fed.sync(5)
    prompts = [Prompt((0, row), np.arange(3, 9 + row, dtype=np.int32), "q", "1") for row in (0, 1)]
    rollout = lambda: fed._run(replica.rollout(prompts, Sampling(3, 1.0, 11)))  # noqa: E731
    samples = list(rollout())
    assert len(samples) == 6
    for sample in samples:
        assert (sample.versions == 5).all()
        whole = np.concatenate([sample.prompt_ids, sample.response_ids])
        expected = log_probs_of(sent, whole)[len(sample.prompt_ids) - 1 :]
        assert np.abs(sample.log_probs - expected).max() < TOLERANCE
    again = list(rollout())
    for first, second in zip(samples, again, strict=True):
        assert np.array_equal(first.response_ids, second.response_ids), "seeded samples repeat"
