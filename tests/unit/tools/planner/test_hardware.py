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
    # Without the moments 8 bytes are left, in 55 GB again.
    assert planned("Qwen/Qwen2.5-7B", "H100", "actor.optimizer_offload=true").min_ranks == 2
    assert planned("Qwen/Qwen2.5-7B", "H200").places > seven.places > 0


@pytest.mark.parametrize(
    ("keys", "bytes_per_parameter"),
    [
        ([], 16 + 16),
        (["actor.optimizer_offload=true"], 8 + 16),
        (["critic.optimizer_offload=true"], 16 + 8),
        (["actor.param_offload=true"], 16),
        (["critic.param_offload=true"], 16),
        (["model.lora_rank=8", "actor.optimizer_offload=true"], 2 + 16),
    ],
)
def test_each_role_offloads_its_own_state(keys, bytes_per_parameter):
    cfg = load_config(["config=config/ppo_gae.yaml", *keys])
    model = hardware.planned_model("Qwen/Qwen2.5-7B")
    assert hardware._state_bytes(cfg, model) == bytes_per_parameter * model.parameters


def advice(ranks: int | tuple[int, ...], *keys: str) -> list[str]:
    """Of the 7B on H100s, where the fastest arrangement trains on the first of `ranks`."""
    counts = [ranks] if isinstance(ranks, int) else list(ranks)
    return planned("Qwen/Qwen2.5-7B", "H100", *keys).longest.advice(counts)


LONG = ("data.max_prompt_length=2048", "data.max_response_length=129024")


def test_it_divides_sequences_that_do_not_fit():
    recomputed = "actor.activation_checkpointing=true"
    assert not advice(8, "data.max_response_length=2048", recomputed)
    divided = f"set {recomputed} actor.sequence_parallel_size={{}}: so the longest sequence fits on"
    (line,) = advice(4, *LONG)
    assert line == f"{divided.format(2)} 4 GPUs of the trainer"
    # Neither 2 nor 4 divides seven ranks, though both divide the 28 heads, and 7 not eight.
    (line,) = advice(7, *LONG)
    assert line == f"{divided.format(7)} 7 GPUs of the trainer"
    four_times = [key.replace("129024", "522240") for key in LONG]
    (line,) = advice(8, *four_times, recomputed)
    assert line.startswith("the longest sequence fits on no number of ranks")
    assert "sequence_parallel_size=7: so" in advice((8, 7), *four_times, recomputed)[0]
    keys = (*LONG, recomputed, "placement.pools={rollout: [4], actor: [4]}")
    found = [
        planned("Qwen/Qwen2.5-7B", "H100", *keys, f"actor.sequence_parallel_size={size}")
        for size in (1, 2, 4)
    ]
    assert [bool(plan.longest.advice([4])) for plan in found] == [True, False, False]
    # What a rank keeps is divided, and what it exchanges costs time: of each token 28 queries and
    # outputs, and 4 keys and values, of width 128 in 28 layers, half of them to the other rank, in
    # three passes.
    assert found[2].lines[-2] == "longest sequence: 131,072 tokens"
    assert "with it, 32,768 tokens on each of its 4 ranks: " in found[2].lines[-1]
    exchanged = 3 * 28 * (2 * 28 + 2 * 4) * 128 * 2 / 2
    more = found[1].work.train_token_s - found[0].work.train_token_s
    assert more == pytest.approx(exchanged / hardware.SYNC_BYTES_PER_S)


def test_it_counts_the_micro_batches_of_short_sequences():
    """More ranks have as many tokens each: smaller micro-batches are what helps."""
    keys = ("data.max_response_length=2048", "actor.activation_checkpointing=true")
    budget = "actor.micro_batch_tokens=524288"
    (line,) = advice(4, *keys, budget)
    assert line.startswith("set actor.micro_batch_tokens=65536: so the longest sequence fits")
    one, four = (
        planned(
            "Qwen/Qwen2.5-7B",
            "H100",
            *keys,
            budget,
            "placement.pools={rollout: [4], actor: [4]}",
            f"actor.sequence_parallel_size={size}",
        )
        for size in (1, 4)
    )
    assert "524,288 tokens on a rank: " in one.lines[-1]
    assert "524,288 tokens on each of its 4 ranks: " in four.lines[-1]


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


def test_synchronous_steps_of_a_run_that_lends_need_it_off(capsys):
    arguments = [SEVEN_B, "--hardware", "H200", "--gpus", "4", "placement.lend=true"]
    assert main([*arguments, "placement.pools={rollout: [2], actor: [2]}"]) == 0
    out = capsys.readouterr().out
    assert "(pipeline.staleness=0 placement.lend=false)" in out


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
