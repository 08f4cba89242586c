"""Plans for GPUs that are not here: known shapes, measured figures, and one line for bad input."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import transformers

from one_step_off.config.command_line import exit_code
from one_step_off.config.loading import load_config
from one_step_off.config.schema import Config
from one_step_off.data.token_work import pass_work
from one_step_off.tools.planner import hardware, planner

main = partial(exit_code, planner.main)
FILE = "config=config/qwen_gsm8k_fsdp.yaml"
SMALL = [FILE, "data.train_batch_size=8", "actor.ppo_mini_batch_size=8", "rollout.n=4"]
SEVEN_B = "model.path=Qwen/Qwen2.5-7B-Instruct"
PARAMETERS = {
    "Qwen/Qwen2.5-0.5B-Instruct": 0.494,
    "Qwen/Qwen2.5-Math-1.5B": 1.544,
    "Qwen/Qwen2.5-3B": 3.086,
    "Qwen/Qwen2.5-Coder-7B-Instruct": 7.616,
    "Qwen/Qwen2.5-14B": 14.770,
    "Qwen/Qwen2.5-32B": 32.764,
    "Qwen/Qwen2.5-72B": 72.706,
    "Qwen/Qwen3-0.6B": 0.596,
    "Qwen/Qwen3-1.7B": 1.721,
    "Qwen/Qwen3-4B": 4.022,
    "Qwen/Qwen3-8B": 8.191,
    "Qwen/Qwen3-14B": 14.768,
    "Qwen/Qwen3-32B": 32.762,
    "meta-llama/Llama-3.2-1B-Instruct": 1.236,
    "meta-llama/Llama-3.2-3B": 3.213,
    "meta-llama/Meta-Llama-3.1-8B": 8.030,
    "meta-llama/Llama-3.1-70B-Instruct": 70.554,
}
"""Billions, as the models' cards or indices of weights have them."""


@pytest.mark.parametrize("path", PARAMETERS)
def test_known_shapes_have_the_published_parameters(path):
    billions = hardware.planned_model(path).parameters / 1e9
    assert billions == pytest.approx(PARAMETERS[path], abs=0.0006)


def planned(path: str, gpu: str, *keys: str) -> hardware.Plan:
    cfg = load_config([FILE, f"model.path={path}", *keys])
    return hardware.by_hardware(cfg, hardware.planned_model(path), hardware.planned_gpu(gpu))


def test_the_measurements_that_calibrate_it():
    """One H200: generation of the 0.5B with 512 sequences, and training of both sizes."""
    keys = ("data.max_prompt_length=256", "data.max_response_length=512")
    work = planned("Qwen/Qwen2.5-0.5B", "NVIDIA H200", *keys).work
    assert 512 / (work.decode_s + 511 * work.sequence_s) == pytest.approx(63_000, rel=0.05)
    for path, length, tokens_per_s in (
        ("Qwen/Qwen2.5-0.5B", 735, 87_200),
        ("Qwen/Qwen2.5-7B", 4096, 9_000),
    ):
        model = hardware.planned_model(path)
        flops = model.shape.train_flops(pass_work([length], length - 1)) / length
        rate = hardware.GPUS["H200"].flops_per_s * hardware.train_mfu(model.parameters)
        assert rate / flops == pytest.approx(tokens_per_s, rel=0.02)


def test_memory_bounds_the_trainer_and_the_replicas():
    assert planned("Qwen/Qwen2.5-0.5B", "H100").min_ranks == 1
    # 16 bytes for each of 7.6 billion parameters, in 80 GB less 25.
    seven = planned("Qwen/Qwen2.5-7B", "H100")
    assert seven.min_ranks == 3
    offloaded = ("actor.param_offload=true", "actor.optimizer_offload=true")
    assert planned("Qwen/Qwen2.5-7B", "H100", *offloaded).min_ranks == 1
    assert planned("Qwen/Qwen2.5-7B", "H200").places > seven.places > 0


LONG = ("data.max_prompt_length=2048", "data.max_response_length=129024")


def test_it_divides_sequences_that_do_not_fit():
    short = planned("Qwen/Qwen2.5-7B", "H100", "data.max_response_length=2048")
    assert not short.advice
    recomputed = "actor.activation_checkpointing=true"
    (line,) = planned(
        "Qwen/Qwen2.5-7B", "H100", *LONG, "actor.activation_checkpointing=false"
    ).advice
    assert line == f"set {recomputed} actor.sequence_parallel_size=2: so the longest sequence fits"
    divided = (*LONG, recomputed, "placement.pools={rollout: [4], actor: [4]}")
    found = [
        planned("Qwen/Qwen2.5-7B", "H100", *divided, f"actor.sequence_parallel_size={size}")
        for size in (1, 2, 4)
    ]
    assert [bool(plan.advice) for plan in found] == [True, False, False]
    # What a rank keeps is divided, and what it exchanges costs time: of each token 28 queries and
    # outputs, and 4 keys and values, of width 128 in 28 layers, half of them to the other rank, in
    # three passes.
    assert ", 131,072 tokens: " in found[2].lines[-1]
    assert "GB on each of its 4 ranks" in found[2].lines[-1]
    exchanged = 3 * 28 * (2 * 28 + 2 * 4) * 128 * 2 / 2
    more = found[1].work.train_token_s - found[0].work.train_token_s
    assert more == pytest.approx(exchanged / hardware.SYNC_BYTES_PER_S)


def test_lengths_with_a_given_mean():
    cfg = load_config([FILE])
    lengths = hardware.response_lengths(cfg, 300)
    assert lengths.mean() == pytest.approx(300, rel=0.01)
    assert lengths.max() > 2 * lengths.mean()
    evenly = hardware.response_lengths(cfg, None)
    assert evenly.max() == cfg.data.max_response_length
    assert np.ptp(np.diff(evenly)) <= 1


def test_eight_gpus_and_a_7b(capsys):
    arguments = [*SMALL, SEVEN_B, "--hardware", "H200", "--gpus", "8", "--response-tokens", "300"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    for words in (
        "Qwen/Qwen2.5-7B-Instruct, 7.62 billion parameters, by the known shape of qwen2.5-7b",
        "GPU: H200, 989 TFLOP/s in bf16, 141 GB of memory at 4.80 TB/s",
        "nothing was run",
        "best: ",
        "next: set pipeline.staleness=",
    ):
        assert words in out
    assert "--response-tokens" not in out


def test_neither_data_nor_a_config_nor_fitting_pools_are_needed(capsys):
    assert main([SEVEN_B, "--hardware", "H200", "--gpus", "4"]) == 0
    assert main([*SMALL, "data.train_files=nowhere.jsonl", "--hardware", "H200"]) == 0
    large = ["model.path=Qwen/Qwen2.5-72B", "rollout.tensor_parallel_size=4"]
    assert main([*SMALL, *large, "--hardware", "H100", "--gpus", "26"]) == 0
    assert "4 + 22 " in capsys.readouterr().out


def test_a_critic_has_the_epochs_of_the_actor():
    critic = "config=config/ppo_gae.yaml"
    cfg = load_config([critic, "critic.ppo_epochs=null"])
    same = load_config([critic, f"critic.ppo_epochs={cfg.actor.ppo_epochs}"])
    model, gpu = hardware.planned_model("Qwen/Qwen2.5-7B"), hardware.GPUS["H200"]
    work, expected = (hardware.by_hardware(c, model, gpu).work for c in (cfg, same))
    assert work.train_token_s == expected.train_token_s


def test_its_libraries_are_quiet():
    command = [sys.executable, "-m", "one_step_off.plan", *SMALL, SEVEN_B, "--hardware", "H200"]
    done = subprocess.run([*command, "--gpus", "4"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_config_json_alone_is_enough(tmp_path, capsys):
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    config = transformers.AutoConfig.for_model("qwen2", **sizes, num_key_value_heads=2)
    config.save_pretrained(tmp_path)
    arguments = [*SMALL, f"model.path={tmp_path}", "--hardware", "H100", "--gpus", "2"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert f"by the config.json of {tmp_path}" in out
    assert "next: give --response-tokens" in out


def test_a_quantized_engine_has_smaller_weights_and_gets_all_bytes():
    """The layers take half as much memory, the embedding and the head as much as before; what is
    sent stays in bf16."""
    model, gpu = hardware.planned_model("Qwen/Qwen2.5-7B"), hardware.GPUS["H200"]
    plain, quantized, small_cache = Config(), Config(), Config()
    quantized.rollout.quantization = "fp8_per_tensor"
    small_cache.rollout.kv_cache_dtype = "fp8"
    tables = 2 * 152064 * 3584
    assert model.engine_bytes(plain) == 2 * model.parameters
    assert model.engine_bytes(quantized) == model.parameters + tables
    plans = [hardware.by_hardware(cfg, model, gpu) for cfg in (plain, quantized, small_cache)]
    assert plans[0].work.decode_s > plans[1].work.decode_s
    assert plans[0].work.sync_s == plans[1].work.sync_s
    assert plans[0].places < plans[1].places
    assert plans[2].places == pytest.approx(2 * plans[0].places, abs=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hardware", "RTX5090"], "--hardware RTX5090: its figures are not known; give one of H"),
        (["--hardware", "H200", "model.path=a/b"], "a/b: its shape is not known on this machine; "),
        (["--hardware", "H200", "--response-tokens", "9999"], "--response-tokens 9999: must be"),
        (["--response-tokens", "9", "--times", "1,1,1"], "--response-tokens 9: needs --hardware"),
        (
            ["--hardware", "A100", "model.path=Qwen/Qwen2.5-72B"],
            "may be used; rollout.tensor_parallel_size=4 fits",
        ),
        (
            ["--hardware", "H100", "model.path=Qwen/Qwen2.5-32B", "--gpus", "4"],
            "--gpus 4: at least 11 are needed, 1 for a replica and 10 for the trainer; or 10, col",
        ),
    ],
)
def test_bad_input_is_one_line(capsys, arguments, words):
    assert main([*SMALL, SEVEN_B, "--gpus", "8", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.strip().count("\n") == 0


def test_the_help_names_nothing_internal(capsys):
    with pytest.raises(SystemExit):
        planner.main(["--help"])
    out = capsys.readouterr().out
    assert "--hardware" in out
    for name in ("work.Work", ".py", "Arrangement", "`"):
        assert name not in out
