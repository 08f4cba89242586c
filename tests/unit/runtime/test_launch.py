"""What is refused after the config and before any engine: models and data that only their files can tell of."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import ray
import transformers
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from one_step_off.cluster import ray_cluster
from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.monitoring import loggers
from one_step_off.runtime import launch, run_folder
from one_step_off.runtime.failure_report import report_failure
from one_step_off.runtime.interrupts import LoopRunner, stop_on_interrupt
from one_step_off.runtime.prepare import CANARY_TOKENS, ResumePoint
from tests.conftest import tiny_config

ROOT = Path(__file__).parents[3]


def changed(model: str, folder: Path, **keys: object) -> str:
    """A copy of a model directory with other config keys."""
    import shutil

    copy = Path(shutil.copytree(model, folder / "model"))
    config = json.loads((copy / "config.json").read_text()) | keys
    (copy / "config.json").write_text(json.dumps(config))
    return str(copy)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"model_type": "qwen99"},
            "its config cannot be loaded .*newer than transformers .* needs a newer one",
        ),
        ({"model_type": "vit"}, r"\(model type 'vit'\) is no causal language model"),
        (
            {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
            "BertForMaskedLM .* is no causal .*; give",
        ),
        ({"architectures": ["Qwen2Model"]}, "Qwen2Model .* is no causal language model"),
        (
            {"model_type": "openai-gpt", "architectures": ["OpenAIGPTLMHeadModel"]},
            "vLLM.* no code for OpenAIGPTLMHeadModel; give",
        ),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            r"quantized \(gptq\), .*; give the model",
        ),
        (
            {"num_hidden_layers": "two"},
            r"its config cannot be loaded \(Validation error for field .num_hidden_layers.: \w",
        ),
        ({"quantization_config": {"bits": 4}}, r"quantized \(quantization_config in config.json\)"),
        ({"max_position_embeddings": 100}, "max_response_length = 144: .* takes 100 tokens"),
    ],
)
def test_models_that_do_not_fit(models, tmp_path, keys, words):
    cfg = tiny_config(changed(models(), tmp_path, **keys), str(tmp_path / "out"))
    refused(cfg, words)


def test_a_quantized_reference_is_refused(models, tmp_path):
    other = changed(models(), tmp_path, quantization_config={"quant_method": "fp8"})
    roles = {"rollout": "rollout", "actor": "actor", "ref": "actor"}
    changes = {"placement.roles": roles, "algorithm.kl_coef": 0.1, "ref.path": other}
    refused(
        tiny_config(models(), str(tmp_path / "out"), **changes), r"ref.path=.* quantized \(fp8\)"
    )


def refused(cfg: Config, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as e:
        launch.prepare(cfg, lambda line: None)
    assert "\n" not in str(e.value) and not ray.is_initialized()


@pytest.mark.parametrize("others", [[], ["model.Q4_K_M.gguf"], ["adapter_model.safetensors"]])
def test_a_model_without_weights_that_can_be_trained(models, tmp_path, others):
    path = Path(changed(models(), tmp_path))
    (path / "model.safetensors").unlink()
    for name in others:
        (path / name).write_text("x")
    refused(
        tiny_config(str(path), str(tmp_path / "out")),
        f"model.path={path}: has no weights .*GGUF.*; give a model",
    )


def response(code: str) -> httpx.Response:
    request = httpx.Request("HEAD", "http://hub/config.json")
    return httpx.Response(
        403, headers={"X-Error-Code": code, "X-Error-Message": "no"}, request=request
    )


@pytest.mark.parametrize(
    ("cause", "mend"),
    [
        (
            GatedRepoError("403\nno", response=response("GatedRepo")),
            "gated: ask for access .* `hf auth login`",
        ),
        (
            RepositoryNotFoundError("401", response=response("RepoNotFound")),
            "no such model on the hub, .*check the id",
        ),
        (LocalEntryNotFoundError("not there"), "check the network and HF_HUB_OFFLINE"),
    ],
)
def test_hub_models_that_cannot_be_had(tmp_path, monkeypatch, cause, mend):
    """The hub's answers, as its client raises them below transformers."""

    def fail(*args: object, **kwargs: object) -> None:
        raise cause

    monkeypatch.setattr(transformers.utils.hub, "hf_hub_download", fail)
    refused(tiny_config("some/model", str(tmp_path)), f"model.path=some/model: its config .*{mend}")


def test_a_hub_model_that_is_not_here(tmp_path):
    refused(
        tiny_config("some/model", str(tmp_path)), "model.path=some/model: .*; check the network"
    )


def test_the_first_line_waits_for_no_large_import():
    code = "import sys, one_step_off.runtime.launch; print(sorted({'torch', 'ray', 'transformers', 'vllm'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert done.stdout == "[]\n", done.stderr


def test_heads_must_split(models, tmp_path):
    cfg = tiny_config(models(), str(tmp_path), **{"rollout.tensor_parallel_size": 3})
    with pytest.raises(
        ConfigError, match="tensor_parallel_size=3: does not divide the 4 attention heads"
    ):
        launch.prepare(cfg, lambda line: None)


def test_a_missing_tokenizer_is_named(models, tmp_path):
    path = Path(changed(models(), tmp_path))
    for file in path.glob("*token*"):
        file.unlink()
    with pytest.raises(ConfigError, match="its tokenizer cannot be loaded"):
        launch.prepare(tiny_config(str(path), str(tmp_path / "out")), lambda line: None)


def test_prepared_runs_know_their_canary_and_steps(models, tmp_path):
    prepared = launch.prepare(tiny_config(models(), str(tmp_path)), lambda line: None)
    assert len(prepared.canary) == 4 and all(
        2 <= len(ids) <= CANARY_TOKENS for ids in prepared.canary
    )
    assert prepared.data.stream.total_steps == 3 and len(prepared.data.val) == 8
    assert prepared.device == "cpu"


@pytest.mark.parametrize(("inside_s", "cancelled"), [(0.0, False), (0.3, True)])
def test_the_grace_limit_ends_the_run_but_nothing_after_it(tmp_path, inside_s, cancelled):
    """Ctrl-C in the last step: the run ends by itself, and what follows must not be cut off by the old limit."""
    pipeline = SimpleNamespace(stopping=False)

    async def main() -> bool:
        try:
            with stop_on_interrupt(LoopRunner(), pipeline, 0.1, print):
                os.kill(os.getpid(), signal.SIGINT)
                while not pipeline.stopping:
                    await asyncio.sleep(0.001)
                await asyncio.sleep(inside_s)
            await asyncio.sleep(0.3)
        except asyncio.CancelledError:
            return True
        return False

    assert asyncio.run(main()) is cancelled


def test_a_failure_is_told_in_one_line_and_kept_whole(tmp_path, models):
    cfg = tiny_config(models(), str(tmp_path))
    try:
        raise ValueError("first line\nsecond line")
    except ValueError as e:
        said = report_failure(cfg, e)
    assert (
        said.startswith("error: the run ended by ValueError: first line\n")
        and "second line" not in said
    )
    assert "second line" in (tmp_path / "error.log").read_text()


def test_a_refused_logger_leaves_an_earlier_run_as_it_is(models, tmp_path, monkeypatch):
    def refuse(cfg, resumed):
        raise ConfigError("not logged in")

    kept = {
        tmp_path / name: "an earlier run's"
        for name in ("metrics.jsonl", "summary.json", "config.yaml")
    }
    kept |= {tmp_path / "samples" / "step_000000.jsonl": "an earlier run's"}
    (tmp_path / "samples").mkdir()
    for path, text in kept.items():
        path.write_text(text)
    monkeypatch.setattr(loggers, "Wandb", refuse)
    with pytest.raises(ConfigError, match="not logged in"):
        launch.run(
            tiny_config(
                models(), str(tmp_path), **{"logging.wandb": True, "trainer.overwrite": True}
            )
        )
    assert {path: path.read_text() for path in kept} == kept


@pytest.mark.parametrize("ended", [True, False])
def test_a_run_that_was_killed_before_its_model_was_there_goes_on_to_write_it(
    models, tmp_path, monkeypatch, ended, capsys
):
    cfg, ran = tiny_config(models(), str(tmp_path), **{"trainer.total_steps": 3}), []
    state = {"step": 3, "evaluations": [], "unwritten": {}, "has_samples": False}
    prepare = launch.prepare

    def prepared(*args):
        found = prepare(*args)
        return replace(found, resume_point=ResumePoint(tmp_path / "checkpoints/step_000003", state))

    def run(prepared, tracker):
        ran.append(tracker.first_step)
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "prepare", prepared)
    monkeypatch.setattr(launch, "run_on_ray", run)
    if ended:
        (tmp_path / "summary.json").write_text("{}")
        assert launch.run(cfg) == 0 and "nothing is left to do" in capsys.readouterr().out
    else:
        with pytest.raises(KeyboardInterrupt):
            launch.run(cfg)
    assert ran == ([] if ended else [3])


def test_an_address_where_no_cluster_answers_is_refused_at_once() -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{s.getsockname()[1]}"
        with pytest.raises(
            ConfigError, match=f"RAY_ADDRESS={address}: no Ray cluster answers there"
        ):
            ray_cluster.require_cluster(address)
    with socket.create_server(("127.0.0.1", 0)) as s:

        def answer() -> None:
            connection, _ = s.accept()
            connection.sendall(b"\0\0\6\4\0\0\0\0\0\0\5\0\0\x40\0")  # a gRPC server's settings
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        ray_cluster.require_cluster(f"127.0.0.1:{s.getsockname()[1]}")
    ray_cluster.require_cluster("auto")  # Ray finds it


def test_a_cluster_that_lets_nobody_in_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's head asks for a token, of which `ray.init` with an address knows nothing."""

    def refuse(**_: object) -> None:
        raise ConnectionError("Failed to connect to Ray cluster at x")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    with pytest.raises(
        ConfigError,
        match="Ray does not start: ConnectionError: Failed to connect.*RAY_ADDRESS and RAY_AUTH_",
    ):
        launch.start_ray(Config())


def test_models_of_other_roles_are_checked_before_anything_starts(models, tmp_path):
    """Critic and reference must read the policy's tokens; a reward model may have tokens of its own."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    other = Path(changed(models(), tmp_path))
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["a_word_of_its_own"])
    tokenizer.save_pretrained(other)
    for role, ours in (
        ("ref", {"algorithm.kl_coef": 0.1}),
        ("critic", {"algorithm.adv_estimator": "gae"}),
    ):
        for path, said in (
            (str(other), "its tokens mean something else"),
            ("no/model", "its config cannot be loaded"),
        ):
            roles = {"placement.roles": {"rollout": "rollout", "actor": "actor", role: "actor"}}
            cfg = tiny_config(models(), str(tmp_path), **ours, **roles, **{f"{role}.path": path})
            with pytest.raises(ConfigError, match=f"{role}.path={path}: {said}"):
                launch.prepare(cfg, lambda line: None)
    roles = {"placement.roles": {"rollout": "rollout", "actor": "actor", "reward_model": "actor"}}
    AutoModelForSequenceClassification.from_pretrained(other, num_labels=1).save_pretrained(other)
    launch.prepare(
        tiny_config(models(), str(tmp_path), **roles, **{"reward_model.path": str(other)}),
        lambda line: None,
    )


def test_the_run_folder_names_models_as_the_user_did(models, tmp_path):
    roles = {
        "placement.roles": {"rollout": "rollout", "actor": "actor", "ref": "actor"},
        "algorithm.kl_coef": 0.1,
    }
    cfg = tiny_config(models(), str(tmp_path), **roles, **{"ref.path": models()})
    prepared = launch.prepare(cfg, lambda line: None)
    named_models = prepared.named_models | {"model": "tiny:qwen2", "ref": "tiny:qwen3"}
    run_folder.write_config_and_versions(cfg, named_models, prepared.device)
    written = (tmp_path / "config.yaml").read_text()
    assert (
        "path: tiny:qwen2" in written and "path: tiny:qwen3" in written and models() not in written
    )


def test_rows_that_their_agent_loop_cannot_use_are_refused_before_engines_start(models, tmp_path):
    cfg = tiny_config(models(), str(tmp_path), **{"agent.loop": "environment"})
    refused(cfg, "agent_loop.environment:Puzzle does not begin with the ground truth")


def test_settings_of_loops_that_no_row_uses_are_told(models, tmp_path):
    unused = {"agent.tools": "calculator", "agent.loop_kwargs": {"tool": {"taught": True}}}
    said = []
    launch.prepare(tiny_config(models(), str(tmp_path), **unused), said.append)
    assert [line.split(":")[1] for line in said if "warning" in line] == [
        " agent.loop_kwargs.tool",
        " agent.tools=calculator",
    ]
    said.clear()
    prepared = launch.prepare(
        tiny_config(models(), str(tmp_path), **{"agent.loop": "tool"} | unused), said.append
    )
    assert not any("warning" in line for line in said) and prepared.loop_names == ["tool"]
