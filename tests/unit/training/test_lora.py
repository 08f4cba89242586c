"""LoRA under FSDP2 against peft on plain models: what is trained, streamed, saved and resumed; on
one rank and on several."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import peft
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
import transformers

from one_step_off.config.errors import ConfigError
from one_step_off.runtime.validation import validate
from one_step_off.training import lora
from one_step_off.training.fsdp_workers import PolicyWorker
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
)

RANK, ALPHA = 3, 12  # odd, so that two ranks do not share A's rows evenly
SCALE = ALPHA / RANK


def adapted(path, **changes):
    """A config with adapters, at a rate that moves them visibly."""
    own = {"model__lora_rank": RANK, "model__lora_alpha": ALPHA, "actor__lr": 1e-2}
    return config(path, **own | changes)


class Adapting(PolicyWorker):
    """Keeps the adapters' whole gradients; frozen weights have none."""

    def _optimizer_step(self, stats):
        named: list[Any] = list(self.model.named_parameters())
        assert {n for n, p in named if p.grad is not None} == {n for n, _ in named if ".lora_" in n}
        self.gradients = {
            n: p.grad.full_tensor().numpy().copy() for n, p in named if p.grad is not None
        }
        return super()._optimizer_step(stats)


def streamed(worker):
    """Name, first and last row, and a copy of every piece that this rank sends."""
    sent = zip(worker.weight_plan(), worker.weight_tensors(), strict=True)
    return [(p.name, p.start, p.stop, t.clone()) for p, t in sent]


def copied(worker):
    """The adapter; on one rank its tensors are the live ones."""
    return {n: t.clone() for n, t in worker.adapters.state().items()}


def merged_by_peft(path, state, dtype=torch.float32):
    """The parameters of the base with the adapter merged into it, by peft alone."""
    base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    model = peft.get_peft_model(
        base, peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear")
    )
    missed = peft.set_peft_model_state_dict(model, state)
    assert not missed.unexpected_keys and not [k for k in missed.missing_keys if "lora" in k]
    return dict(model.merge_and_unload().named_parameters())


def run_rank(rank, world, port, path, fsdp_size, out):
    """Two updates; between them a checkpoint, a model, and the stream. Then the second once more,
    resumed."""
    torch.set_num_threads(1)
    cfg, batch = adapted(path, actor__grad_clip=0.5, actor__fsdp_size=fsdp_size), make_batch(path)
    worker = start(cfg, rank=rank, world=world, port=port, cls=Adapting)
    found = {"first": streamed(worker), "log_probs": worker.log_prob(batch)}
    worker.update(batch)
    found |= {
        "second": streamed(worker),
        "state": copied(worker),
        "trained": worker.log_prob(batch),
    }
    os.makedirs(f"{out}/state", exist_ok=True)
    worker.save_state(f"{out}/state")
    worker.saved()
    worker.save_hf(f"{out}/hf")
    metrics = worker.update(batch)
    found |= {
        "gradients": worker.gradients,
        "third": streamed(worker),
        "norm": metrics["actor/grad_norm"],
    }
    worker.load_state(f"{out}/state")
    found["loaded"] = streamed(worker)
    worker.update(batch)
    found |= {"again": streamed(worker), "version": worker.version}
    torch.save(found, f"{out}/{world}_{rank}.pt")
    end()


WORLDS = {"one rank": (1, "tied", -1), "two ranks": (2, "untied", -1), "HSDP": (4, "tied", 2)}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(n, id=n, marks=[pytest.mark.slow] * (w[0] > 2)) for n, w in WORLDS.items()
    ],
)
def ran(request, model_folders, tmp_path_factory):
    """The path of the model, the folder, and what each rank found."""
    world, name, fsdp_size = WORLDS[request.param]
    out = tmp_path_factory.mktemp("lora")
    mp.spawn(
        run_rank, args=(world, free_port(), model_folders[name], fsdp_size, str(out)), nprocs=world
    )
    return (
        model_folders[name],
        out,
        [torch.load(out / f"{world}_{r}.pt", weights_only=False) for r in range(world)],
    )


def joined(results, key):
    """Whole tensors out of all ranks' pieces."""
    rows = {}
    for name, begin, _, tensor in sorted((p for r in results for p in r[key]), key=lambda p: p[:2]):
        rows.setdefault(name, []).append((begin, tensor))
    return {name: torch.cat([t for _, t in parts]) for name, parts in rows.items()}


def test_the_stream_is_the_base_with_the_adapters_merged(ran):
    path, _, results = ran
    base, first, second = (
        dict(hf_model(path).named_parameters()),
        joined(results, "first"),
        joined(results, "second"),
    )
    assert first.keys() == second.keys() == base.keys()
    assert all(torch.equal(first[n], p) for n, p in base.items()), (
        "before the first update they do nothing"
    )
    merged = merged_by_peft(path, results[0]["state"])
    for n, p in merged.items():
        torch.testing.assert_close(second[n], p.detach(), atol=1e-6, rtol=0)
        moved = "proj" in n and n.endswith("weight")
        assert torch.equal(second[n], base[n]) != moved, "adapters move, and nothing else"
    later = [(n, row) for result in results[1:] for n, row, *_ in result["second"]]
    assert len(results) == 1 or any(
        n == "model.layers.0.mlp.up_proj.weight" and row for n, row in later
    )


def test_the_trainer_computes_with_the_merged_weights(ran):
    path, out, results = ran
    batch = make_batch(path)
    for key, model in (("log_probs", hf_model(path)), ("trained", hf_model(out / "hf"))):
        answers = {i: a for r in results for i, a in r[key].items()}
        for i, s in enumerate(batch.samples):
            with torch.no_grad():
                np.testing.assert_allclose(
                    answers[i], hf_log_probs(model, s, 0.7).numpy(), atol=2e-5, rtol=0
                )


def test_gradients_are_those_of_the_merged_weights_by_the_chain_rule(ran, start_single):
    """With W' = W + s B A: dL/dB = s dL/dW' A^T, dL/dA = s B^T dL/dW'. The right sides by full
    training of W'."""
    path, out, results = ran
    worker = start_single(config(str(out / "hf")), cls=Recorder)
    worker.update(make_batch(path))
    want = {}
    for name, tensor in results[0]["state"].items():
        layer, part, _ = name.removeprefix("base_model.model.").rsplit(".", 2)
        g, state = worker.gradients[f"{layer}.weight"].astype(np.float64), results[0]["state"]
        a, b = (
            state[f"base_model.model.{layer}.{k}.weight"].double().numpy()
            for k in ("lora_A", "lora_B")
        )
        want[f"{layer}.{part}.default.weight"] = SCALE * (b.T @ g if part == "lora_A" else g @ a.T)
        assert tensor.dtype == torch.float32
    for r in results:
        assert_gradients_equal(r["gradients"], want, rtol=2e-5)
        assert r["norm"] == pytest.approx(
            np.sqrt(sum((g**2).sum() for g in want.values())), rel=1e-4
        )


def test_a_checkpoint_holds_the_adapters_and_resumes_bit_for_bit(ran, start_single):
    path, out, results = ran
    for r in results:
        assert r["version"] == 2
        for (n, *_, x), (*_, loaded), (*_, y), (*_, again) in zip(
            r["second"], r["loaded"], r["third"], r["again"], strict=True
        ):
            assert torch.equal(x, loaded) and torch.equal(y, again), n
    assert any(
        not torch.equal(x, y)
        for (*_, x), (*_, y) in zip(results[0]["second"], results[0]["third"], strict=True)
    )
    stored = dcp.FileSystemReader(out / "state" / "actor").read_metadata().state_dict_metadata
    weights = [k for k in stored if k.startswith("model.")]
    assert weights and all(
        ".lora_" in k for k in stored if not k.startswith("optimizer.param_groups")
    ), stored.keys()
    worker = start_single(adapted(path))  # on one rank, whatever wrote it
    worker.load_state(str(out / "state"))
    for name, tensor in joined(results, "second").items():
        torch.testing.assert_close(
            {n: t for n, *_, t in streamed(worker)}[name], tensor, atol=1e-7, rtol=0
        )
    with pytest.raises(ConfigError, match="part of the actor does not fit its model .Missing key"):
        start_single(config(path)).load_state(str(out / "state"))


def test_hf_model_is_merged_and_has_the_adapter_beside_it(ran):
    path, out, results = ran
    saved, second = hf_model(out / "hf"), joined(results, "second")
    for n, p in saved.named_parameters():
        assert torch.equal(p, second[n]), n
    model = peft.PeftModel.from_pretrained(hf_model(path), str(out / "hf" / "adapter"))
    for n, p in model.merge_and_unload().named_parameters():
        torch.testing.assert_close(p.detach(), second[n], atol=1e-6, rtol=0)
    assert sorted(p.name for p in (out / "hf" / "adapter").glob("*.safetensors")) == [
        "adapter_model.safetensors"
    ]


def test_bfloat16_rounds_once_and_keeps_adapters_in_fp32(model_folders, start_single):
    path = model_folders["tied"]
    worker = start_single(adapted(path, model__dtype="bfloat16"), cls=Adapting)
    worker.update(make_batch(path))
    held = {".lora_" in n: p.dtype for n, p in worker.model.named_parameters()}
    assert held == {True: torch.float32, False: torch.bfloat16}
    base = {n: p.bfloat16().float() for n, p in hf_model(path).named_parameters()}
    state = worker.adapters.state()
    for name, _, _, tensor in streamed(worker):
        prefix = f"base_model.model.{name.removesuffix('weight')}"
        want = base[name]
        if f"{prefix}lora_A.weight" in state:
            want = want + SCALE * state[f"{prefix}lora_B.weight"] @ state[f"{prefix}lora_A.weight"]
        tensor = tensor.bfloat16()  # as the sender packs it
        torch.testing.assert_close(tensor, want.bfloat16(), atol=1e-6, rtol=2**-7)
        assert (tensor == want.bfloat16()).float().mean() > 0.99


def test_the_reference_is_the_base_and_chosen_layers_alone_have_adapters(
    model_folders, start_single
):
    path = model_folders["untied"]
    ref = start_single(adapted(path), role="ref", cls=PolicyWorker)
    assert not any("lora" in n for n, _ in ref.model.named_parameters()) and not ref.adapters.layers
    batch, model = make_batch(path), hf_model(path)
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
    with pytest.raises(ConfigError, match="lm_head is no linear layer with weights of its own"):
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
        cfg.data.train_files, cfg.trainer.total_steps, cfg.placement.device = (
            "generator:word_problems",
            1,
            "cpu",
        )
        with pytest.raises(ConfigError, match=message):
            validate(cfg, num_gpus=0)


def test_settings_are_pefts():
    own = config("x", model__lora_rank=4, model__lora_target_modules="q_proj, v_proj").model
    found = lora.peft_config(own)
    assert (found.r, found.lora_alpha, found.target_modules) == (4, 32, {"q_proj", "v_proj"})
