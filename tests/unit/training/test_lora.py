"""LoRA under FSDP2 against peft on plain models: what is trained, streamed, saved and resumed; on
one rank and on several."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np
import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import load_file

from one_step_off.cluster.errors import SyncError
from one_step_off.config.errors import ConfigError
from one_step_off.runtime.validation import validate
from one_step_off.training import lora
from one_step_off.training.fsdp.fsdp_workers import PolicyWorker
from one_step_off.weight_sync import base_weights
from one_step_off.weight_sync.base_weights import BaseModel
from tests.unit.forked_ranks import run_ranks
from tests.unit.models.families import CONFIGS
from tests.unit.training.fsdp_helpers import (
    Recorder,
    assert_gradients_equal,
    config,
    end,
    free_port,
    hf_log_probs,
    hf_model,
    make_batch,
    start,
    write_model,
)

RANK = 3  # odd, so that two ranks do not share A's rows evenly
ALPHA = 12
SCALE = ALPHA / RANK


def adapted(path, **changes):
    """A config with adapters, at a rate that moves them visibly."""
    keys = {"model__lora_rank": RANK, "model__lora_alpha": ALPHA, "actor__lr": 1e-2}
    return config(path, **keys | changes)


class Adapting(PolicyWorker):
    """Keeps the adapters' whole gradients; frozen weights have none."""

    def _optimizer_step(self, stats):
        named: list[Any] = list(self.model.named_parameters())
        assert {n for n, p in named if p.grad is not None} == {n for n, _ in named if ".lora_" in n}
        self.gradients = {
            n: p.grad.full_tensor().numpy().copy() for n, p in named if p.grad is not None
        }
        return super()._optimizer_step(stats)


@dataclass(frozen=True)
class Rows:
    """A piece that a rank sends: the rows of a tensor from `start` on."""

    name: str
    start: int
    tensor: torch.Tensor


def streamed(worker) -> list[Rows]:
    """Copies of what this rank sends."""
    sent = zip(worker.weight_plan(), worker.weight_tensors(), strict=True)
    return [Rows(piece.name, piece.start, tensor.clone()) for piece, tensor in sent]


def streamed_alone(worker) -> list[Rows]:
    """As `streamed`, with weight_sync.lora=adapter."""
    worker._matrices = worker._sent_adapters()
    rows = streamed(worker)
    worker._matrices = None
    return rows


def copied(worker):
    """The adapter; on one rank its tensors are the live ones."""
    return {name: tensor.clone() for name, tensor in worker.adapters.state().items()}


def merged_by_peft(path, state, dtype=torch.float32):
    """The parameters of the base with the adapter merged into it, by peft alone."""
    base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
    )
    missed = peft.set_peft_model_state_dict(model, state)
    assert not missed.unexpected_keys
    assert not [k for k in missed.missing_keys if "lora" in k]
    return dict(model.merge_and_unload().named_parameters())


def run_rank(rank, world, port, path, fsdp_size, out):
    """Two updates; between them a checkpoint, a model, and the stream. Then the second one again,
    from the checkpoint."""
    torch.set_num_threads(1)
    cfg = adapted(path, actor__grad_clip=0.5, actor__fsdp_size=fsdp_size)
    batch = make_batch(path)
    worker = start(cfg, rank=rank, world=world, port=port, cls=Adapting)
    result = {"first": streamed(worker), "log_probs": worker.log_prob(batch)}
    worker.update(batch)
    result["second"] = streamed(worker)
    result["alone"] = streamed_alone(worker)
    result["digests"] = worker.base_digests()
    result["state"] = copied(worker)
    result["trained"] = worker.log_prob(batch)
    os.makedirs(f"{out}/state", exist_ok=True)
    worker.save_state(f"{out}/state")
    worker.saved()
    worker.save_hf(f"{out}/hf")
    metrics = worker.update(batch)
    result["gradients"] = worker.gradients
    result["third"] = streamed(worker)
    result["norm"] = metrics["actor/grad_norm"]
    worker.load_state(f"{out}/state")
    result["loaded"] = streamed(worker)
    worker.update(batch)
    result["third again"] = streamed(worker)
    result["version"] = worker.version
    torch.save(result, f"{out}/{world}_{rank}.pt")
    end()


@dataclass(frozen=True)
class World:
    """So many ranks on a model, `fsdp_size` of them with one copy."""

    ranks: int
    model: str
    fsdp_size: int


WORLDS = [
    pytest.param(World(1, "tied", -1), id="one rank"),
    pytest.param(World(2, "untied", -1), id="two ranks"),
    pytest.param(World(4, "tied", 2), id="HSDP", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module", params=WORLDS)
def ran(request, model_folders, tmp_path_factory):
    """The path of the model, the folder, and what each rank computed."""
    world = request.param
    path = model_folders[world.model]
    out = tmp_path_factory.mktemp("lora")
    args = (world.ranks, free_port(), path, world.fsdp_size, str(out))
    run_ranks(run_rank, args, world.ranks)
    files = [out / f"{world.ranks}_{rank}.pt" for rank in range(world.ranks)]
    return path, out, [torch.load(file, weights_only=False) for file in files]


def joined(results, key):
    """Whole tensors out of all ranks' pieces."""
    pieces = [rows for result in results for rows in result[key]]
    parts: dict[str, list[torch.Tensor]] = {}
    for rows in sorted(pieces, key=lambda rows: (rows.name, rows.start)):
        parts.setdefault(rows.name, []).append(rows.tensor)
    return {name: torch.cat(tensors) for name, tensors in parts.items()}


def test_the_stream_is_the_base_with_the_adapters_merged(ran):
    path, _, results = ran
    base = dict(hf_model(path).named_parameters())
    first = joined(results, "first")
    second = joined(results, "second")
    assert first.keys() == second.keys() == base.keys()
    for name, parameter in base.items():
        assert torch.equal(first[name], parameter), "before the first update they do nothing"
    merged = merged_by_peft(path, results[0]["state"])
    for name, parameter in merged.items():
        torch.testing.assert_close(second[name], parameter.detach(), atol=1e-6, rtol=0)
        has_adapter = "proj" in name and name.endswith("weight")
        assert torch.equal(second[name], base[name]) != has_adapter, "adapters move, nothing else"


def test_every_rank_sends_rows_with_adapters(ran):
    _, _, results = ran
    later_ranks = [rows for result in results[1:] for rows in result["second"]]
    cut_rows = [rows for rows in later_ranks if rows.name == "model.layers.0.mlp.up_proj.weight"]
    assert len(results) == 1 or any(rows.start > 0 for rows in cut_rows)


def test_the_trainer_computes_with_the_merged_weights(ran):
    path, out, results = ran
    batch = make_batch(path)
    for key, model in (("log_probs", hf_model(path)), ("trained", hf_model(out / "hf"))):
        answers = {}
        for result in results:
            answers |= result[key]
        for i, sample in enumerate(batch.samples):
            with torch.no_grad():
                expected = hf_log_probs(model, sample, 0.7).numpy()
            np.testing.assert_allclose(answers[i], expected, atol=2e-5, rtol=0)


def test_gradients_are_those_of_the_merged_weights_by_the_chain_rule(ran, start_single):
    """With W' = W + s B A: dL/dB = s dL/dW' A^T, dL/dA = s B^T dL/dW'. The right sides by full
    training of W'."""
    path, out, results = ran
    worker = start_single(config(str(out / "hf")), cls=Recorder)
    worker.update(make_batch(path))
    state = results[0]["state"]
    expected = {}
    for name, tensor in state.items():
        assert tensor.dtype == torch.float32
        layer, matrix, _ = name.removeprefix("base_model.model.").rsplit(".", 2)
        merged_gradient = worker.gradients[f"{layer}.weight"].astype(np.float64)
        a = state[f"base_model.model.{layer}.lora_A.weight"].double().numpy()
        b = state[f"base_model.model.{layer}.lora_B.weight"].double().numpy()
        gradient = b.T @ merged_gradient if matrix == "lora_A" else merged_gradient @ a.T
        expected[f"{layer}.{matrix}.default.weight"] = SCALE * gradient
    norm = np.sqrt(sum((gradient**2).sum() for gradient in expected.values()))
    for result in results:
        assert_gradients_equal(result["gradients"], expected, rtol=2e-5)
        assert result["norm"] == pytest.approx(norm, rel=1e-4)


def test_adapters_alone_are_whole_matrices_with_the_scaling_in_b(ran):
    _, _, results = ran
    alone = joined(results, "alone")
    state = results[0]["state"]
    assert len(alone) == len(state)
    for name, tensor in state.items():
        scale = SCALE if ".lora_B." in name else 1.0
        assert torch.equal(alone[name.removeprefix("base_model.model.")], scale * tensor), name


def test_every_block_of_the_base_has_the_digest_of_the_checkpoint(ran):
    path, _, results = ran
    blocks = [block for result in results for block in result["digests"]]
    loaded = dict(hf_model(path).named_parameters())
    plain = BaseModel(blocks).blocks
    base_weights.compare(plain, loaded.items(), "test")
    assert {name for name, *_ in plain} == loaded.keys()
    with pytest.raises(SyncError, match="1 tensors"):
        changed = loaded | {"model.norm.weight": loaded["model.norm.weight"] * 2}
        base_weights.compare(plain, changed.items(), "test")


def test_the_actor_sends_adapters_and_saves_the_whole_model(model_folders, start_single, tmp_path):
    path = model_folders["tied"]
    worker = start_single(adapted(path, weight_sync__lora="adapter"), cls=Adapting)
    worker.update(make_batch(path))
    assert all(".lora_" in rows.name for rows in streamed(worker))
    worker.save_hf(str(tmp_path / "hf"))
    merged = merged_by_peft(path, copied(worker))
    for name, parameter in hf_model(tmp_path / "hf").named_parameters():
        torch.testing.assert_close(parameter, merged[name], atol=1e-6, rtol=0)


def assert_same_stream(first: list[Rows], second: list[Rows]) -> None:
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.tensor, other.tensor), one.name


def test_a_resumed_step_is_the_same_bit_for_bit(ran):
    _, _, results = ran
    for result in results:
        assert result["version"] == 2
        assert_same_stream(result["second"], result["loaded"])
        assert_same_stream(result["third"], result["third again"])
    with pytest.raises(AssertionError):
        assert_same_stream(results[0]["second"], results[0]["third"])


def test_a_checkpoint_holds_the_adapters_alone(ran, start_single):
    path, out, results = ran
    stored = dcp.FileSystemReader(out / "state" / "actor").read_metadata().state_dict_metadata
    assert any(name.startswith("model.") for name in stored)
    for name in stored:
        assert ".lora_" in name or name.startswith("optimizer.param_groups")
    worker = start_single(adapted(path))  # on one rank, whatever wrote it
    worker.load_state(str(out / "state"))
    loaded = joined([{"loaded": streamed(worker)}], "loaded")
    for name, tensor in joined(results, "second").items():
        torch.testing.assert_close(loaded[name], tensor, atol=1e-7, rtol=0)
    with pytest.raises(ConfigError, match="part of the actor does not fit its model .Missing key"):
        start_single(config(path)).load_state(str(out / "state"))


def test_hf_model_is_merged_and_has_the_adapter_beside_it(ran):
    path, out, results = ran
    second = joined(results, "second")
    for name, parameter in hf_model(out / "hf").named_parameters():
        assert torch.equal(parameter, second[name]), name
    adapter = out / "hf" / "adapter"
    model = peft.PeftModel.from_pretrained(hf_model(path), str(adapter))
    for name, parameter in model.merge_and_unload().named_parameters():
        torch.testing.assert_close(parameter.detach(), second[name], atol=1e-6, rtol=0)
    weight_files = [file.name for file in adapter.glob("*.safetensors")]
    assert weight_files == ["adapter_model.safetensors"]


def test_bfloat16_rounds_once_and_keeps_adapters_in_fp32(model_folders, start_single):
    path = model_folders["tied"]
    worker = start_single(adapted(path, model__dtype="bfloat16"), cls=Adapting)
    worker.update(make_batch(path))
    for name, parameter in worker.model.named_parameters():
        assert parameter.dtype == (torch.float32 if ".lora_" in name else torch.bfloat16)
    base = {n: p.bfloat16().float() for n, p in hf_model(path).named_parameters()}
    state = worker.adapters.state()
    for rows in streamed(worker):
        prefix = f"base_model.model.{rows.name.removesuffix('weight')}"
        want = base[rows.name]
        if f"{prefix}lora_A.weight" in state:
            want = want + SCALE * state[f"{prefix}lora_B.weight"] @ state[f"{prefix}lora_A.weight"]
        tensor = rows.tensor.bfloat16()  # as the sender packs it
        torch.testing.assert_close(tensor, want.bfloat16(), atol=1e-6, rtol=2**-7)
        assert (tensor == want.bfloat16()).float().mean() > 0.99


def test_the_reference_is_the_base_and_chosen_layers_alone_have_adapters(
    model_folders, start_single
):
    path = model_folders["untied"]
    ref = start_single(adapted(path), role="ref", cls=PolicyWorker)
    assert not any("lora" in n for n, _ in ref.model.named_parameters())
    assert not ref.adapters.layers
    batch = make_batch(path)
    model = hf_model(path)
    for i, answer in ref.log_prob(batch).items():
        with torch.no_grad():
            np.testing.assert_allclose(
                answer, hf_log_probs(model, batch.samples[i], 0.7).numpy(), atol=1e-5, rtol=0
            )
    few = start_single(
        adapted(
            path,
            model__lora_target_modules="q_proj, down_proj",
            actor__activation_checkpointing=True,
        )
    )
    layers = [
        f"model.layers.{i}.{n}.weight"
        for i in range(2)
        for n in ("self_attn.q_proj", "mlp.down_proj")
    ]
    assert sorted(few.adapters.layers) == sorted(layers)


def test_what_cannot_have_an_adapter_is_refused(model_folders, start_single):
    for path, targets in (
        (model_folders["untied"], "no_such"),
        (model_folders["untied"], "embed_tokens"),
    ):
        with pytest.raises(ConfigError, match=f"model.lora_target_modules={targets}: "):
            start_single(adapted(path, model__lora_target_modules=targets))
    with pytest.raises(ConfigError, match="lm_head is not a linear layer with weights of its own"):
        start_single(adapted(model_folders["tied"], model__lora_target_modules="q_proj,lm_head"))
    for changes, message in (
        (
            {"actor__backend": "megatron"},
            "model.lora_rank=3: only the fsdp back end trains adapters; set it to 0, or",
        ),
        (
            {"model__lora_target_modules": "q_proj,,v"},
            "model.lora_target_modules=q_proj,,v: must be all-linear, or",
        ),
    ):
        cfg = adapted(model_folders["tied"], **changes)
        cfg.data.train_files = "generator:word_problems"
        cfg.trainer.total_steps = 1
        cfg.placement.device = "cpu"
        with pytest.raises(ConfigError, match=message):
            validate(cfg, num_gpus=0)


def test_settings_are_pefts():
    cfg = config("x", model__lora_rank=4, model__lora_target_modules="q_proj, v_proj")
    settings = lora.peft_config(cfg.model)
    assert settings.r == 4
    assert settings.lora_alpha == 32
    assert settings.target_modules == {"q_proj", "v_proj"}


def test_adapters_beside_experts_are_merged_under_the_names_in_the_files(tmp_path):
    """The experts are frozen and travel as they are; layers that the files call otherwise are
    merged too."""
    path = str(tmp_path / "model")
    write_model(CONFIGS["glm4_moe"](), path)
    cfg = adapted(path, model__lora_target_modules="q_proj,o_proj")
    worker = start(cfg, cls=PolicyWorker)
    worker.update(make_batch(path))
    sent = {rows.name: rows.tensor for rows in streamed(worker)}
    stored = load_file(f"{path}/model.safetensors")
    assert sent.keys() == stored.keys()
    state = copied(worker)
    adapted_names = set()
    for name, tensor in stored.items():
        layer = f"base_model.model.{name.removesuffix('weight')}"
        if f"{layer}lora_A.weight" in state:
            adapted_names.add(name)
            product = state[f"{layer}lora_B.weight"] @ state[f"{layer}lora_A.weight"]
            assert not torch.equal(sent[name], tensor)
            torch.testing.assert_close(sent[name], tensor + SCALE * product)
        else:
            assert torch.equal(sent[name], tensor), name
    assert len(adapted_names) == 4

    adapters = lora.Adapters(worker.model, lambda name: f"files.{name}")
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(adapters.merged(f"files.{name}", stored[name]), sent[name])
    assert adapters.merged(name, stored[name]) is stored[name]
    end()
