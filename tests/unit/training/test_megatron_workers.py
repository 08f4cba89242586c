"""The Megatron back end against plain Hugging Face models on one process: log-probs, gradients, weights, in any layout."""

import dataclasses
import importlib.util
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from transformers.core_model_loading import revert_weight_conversion

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed (the extra megatron)", allow_module_level=True)

from megatron.core import parallel_state as mpu
from megatron.core.distributed import finalize_model_grads

from one_step_off.config.errors import ConfigError
from one_step_off.models.megatron_support import read_config
from one_step_off.training import megatron_model, megatron_weights
from one_step_off.training.fsdp_workers import WORKERS as FSDP_WORKERS
from one_step_off.training.megatron_workers import WORKERS
from one_step_off.weight_sync.bucket_plan import BucketPlan
from one_step_off.weight_sync.weight_piece import WeightPiece
from tests.unit.training.fsdp_helpers import (
    OBJECTIVES,
    by_hand,
    config,
    free_port,
    hf_log_probs,
    hf_model,
    make_batch,
    start,
)

STEPS = 3
SIZES = {
    "vocab_size": 67,  # odd, so the vocabulary is padded
    "hidden_size": 64,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e3,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LLAMA3["original_max_position_embeddings"] = 8192
configs: Any = transformers  # its dataclasses take more than they declare
MODELS = {
    "qwen2": lambda: configs.Qwen2Config(**SIZES, tie_word_embeddings=True, rope_theta=5e3),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=False),
    "llama": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama3": lambda: transformers.LlamaConfig(
        **SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3
    ),
    "moe": lambda: configs.Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=16, norm_topk_prob=True),
    # The weights of the chosen experts do not add up to 1, and two layers have none.
    "mixed": lambda: configs.Qwen3MoeConfig(
        **SIZES,
        **EXPERTS,
        head_dim=16,
        norm_topk_prob=False,
        mlp_only_layers=[1],
        decoder_sparse_step=2,
    ),
}
DECAY = 0.3  # so much that after three steps of this rate it tells what decays and what does not
EVERYTHING = {
    **OBJECTIVES["everything"],
    "actor__lr": 1e-3,
    "actor__micro_batch_tokens": 60,
    "actor__grad_clip": 1.0,
}
EVERYTHING["actor__weight_decay"] = DECAY


def case(name, model, world, **layout):
    """A name that ends in plain: without the recorder of gradients, so that they are reduced as in a run."""
    changes = {
        **EVERYTHING,
        **{f"actor__{k}": v for k, v in layout.items()},
        "actor__backend": "megatron",
    }
    changes["model__dtype"] = "bfloat16" if "bf16" in name else "float32"
    return name, model, world, changes


TP, PP, EP = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {"expert_parallel_size": 2}
CP = {"context_parallel_size": 2}
SP, VPP = {"sequence_parallel": True}, {"virtual_pipeline_parallel_size": 2}
CASES = [
    case("one", "llama", 1),
    case("one_llama3", "llama3", 1),
    case("one_moe", "moe", 1),
    case("one_mixed", "mixed", 1),
    case("tp2_qwen2", "qwen2", 2, **TP),
    case("tp2_qwen3", "qwen3", 2, **TP),
    case("tp2_sp", "qwen3", 2, **TP, **SP, log_prob_chunk=5),
    case("pp2_qwen2", "qwen2", 2, **PP),
    case("pp2_qwen3", "qwen3", 2, **PP, activation_checkpointing=True),
    case("vpp2", "qwen2", 2, **PP, **VPP),
    case("cp2", "qwen3", 2, **CP, activation_checkpointing=True),
    case("dp2", "qwen2", 2),
    case("dp2_plain", "qwen2", 2),
    case("ep2_plain", "moe", 2, **EP),
    case("tp2_sp_bf16_plain", "qwen3", 2, **TP, **SP),
    case("ep2", "moe", 2, **EP),
    case("ep2_mixed", "mixed", 2, **EP),
    case("tp2_sp_moe", "moe", 2, **TP, **SP),
    case("tp2_ep2", "moe", 2, **TP, **SP, **EP),
    case("tp2_dp2", "qwen2", 4, **TP),
    case("tp2_pp2", "qwen3", 4, **TP, **PP),
    case("pp2_ep2", "moe", 4, **PP, **EP),
    case("tp2_ep2_dp2", "moe", 4, **TP, **SP, **EP),
    case("tp2_cp2", "llama", 4, **TP, **SP, **CP),
    case("vpp2_cp2", "qwen2", 4, **PP, **VPP, **CP),
]
SLOW = {name for name, _, world, _ in CASES if world == 4}


class Recorder(WORKERS["actor"]):
    """Keeps the whole gradient's parts as they are before each optimizer step. Its memory is full of NaN at first."""

    def _build_model(self):
        build = megatron_model.build

        def build_on_nan(*args):
            chunks = build(*args)
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.data.fill_(torch.nan)
            return chunks

        with mock.patch.object(megatron_model, "build", build_on_nan):
            super()._build_model()

    def _build_optimizer(self):
        super()._build_optimizer()
        for chunk in self.models:
            # All ranks are to hold whole sums; the distributed optimizer needs only its part of them.
            chunk.config.finalize_model_grads_func = lambda chunks, *_, **__: finalize_model_grads(
                chunks, force_all_reduce=True
            )

    def _grad_norm(self):
        weights = [(p, p.data) for chunk in self.models for p in chunk.parameters()]
        for parameter, _ in weights:
            parameter.data = parameter.main_grad
        parts = megatron_weights.parts(self.models, self.hf_config, "float32")
        self.gradients = [
            (dataclasses.astuple(piece), view.clone().reshape(piece.block_shape).numpy())
            for piece, view in megatron_weights.share_of(parts)
        ]
        for parameter, data in weights:
            parameter.data = data
        return super()._grad_norm()


def sent_by(worker):
    return [
        (dataclasses.astuple(p), t.float().cpu().clone().numpy())
        for p, t in zip(worker.weight_plan(), worker.weight_tensors(), strict=True)
    ]


def end():
    mpu.destroy_model_parallel()
    dist.destroy_process_group()


def join(worker, name, folder):
    """Set up at a port that rank 0 chooses now: one chosen at the start may be another program's by the time it is used."""
    file = Path(folder) / f"{name}.port"
    if worker.rank == 0:
        (file.parent / f"{name}.tmp").write_text(str(free_port()))
        (file.parent / f"{name}.tmp").rename(file)
    while not file.exists():
        time.sleep(0.05)
    worker.setup("127.0.0.1", int(file.read_text()))


def run_rank(rank, cases, out, device="cpu"):
    torch.set_num_threads(1)
    for name, cfg, world in cases:
        print(f"rank {rank}: {name}", flush=True)
        kind = WORKERS["actor"] if name.endswith("plain") else Recorder
        worker = kind(cfg, "actor", rank, world, device, total_steps=10)
        join(worker, name, out)
        batch = make_batch(cfg.model.path)
        result = {"pieces": sent_by(worker), "log_probs": worker.log_prob(batch)}
        result["squares"] = worker.log_prob_and_squares(batch)
        result["scores"] = worker.score([s.response_ids for s in batch.samples])
        result["metrics"] = worker.update(batch)
        result["gradients"] = getattr(worker, "gradients", None)
        own = {
            p.untyped_storage().data_ptr() for chunk in worker.models for p in chunk.parameters()
        }
        sent = megatron_weights.parts(worker.models, worker.hf_config, "float32")
        result["views"] = all(part.view.untyped_storage().data_ptr() in own for part in sent)
        for _ in range(STEPS - 1):
            worker.update(batch)
        result["weights"] = sent_by(worker)
        worker.save_hf(f"{out}/{name}_hf")
        bad = make_batch(cfg.model.path)
        bad.advantages[0][:] = np.nan  # only one share has this sample; all ranks must skip
        result["skipped"] = worker.update(bad)["actor/skipped_updates"]
        after = sent_by(worker)
        result["same"] = all(
            (a[1] == b[1]).all() for a, b in zip(after, result["weights"], strict=True)
        )
        torch.save(result, f"{out}/{name}_{rank}.pt")
        end()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    return make_checkpoints(tmp_path_factory.mktemp("megatron"))


def make_checkpoints(root):
    from tokenizers import Tokenizer, models

    for name, make in MODELS.items():
        torch.manual_seed(1)
        model = transformers.AutoModelForCausalLM.from_config(make())
        with torch.no_grad():
            for p in model.parameters():
                if p.ndim == 1:  # norms of 1 and biases of 0 would hide a swap
                    p.add_(torch.randn_like(p) * 0.1)
        model.save_pretrained(root / name)
        words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(67)}, unk_token="w0"))
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=words, eos_token="w1"
        ).save_pretrained(root / name)
    return root


def as_stored(model, tensors):
    """By the names of the checkpoint (transformers fuses experts)."""
    return {n: t.detach().numpy() for n, t in revert_weight_conversion(model, tensors).items()}


@pytest.fixture(scope="module")
def reference(checkpoints):
    """By plain Hugging Face and torch's AdamW, of each model: loss, gradients, weights after the steps."""
    found = {}
    for name in MODELS:
        path, batch = str(checkpoints / name), make_batch(str(checkpoints / name))
        cfg = config(path, **EVERYTHING)
        model = hf_model(path)
        groups = [
            [p for p in model.parameters() if p.ndim > 1],
            [p for p in model.parameters() if p.ndim == 1],
        ]
        vectors = {"params": groups[1], "weight_decay": 0.0}
        optimizer = torch.optim.AdamW([{"params": groups[0]}, vectors], lr=1e-3, weight_decay=DECAY)
        for step in range(STEPS):
            model.save_pretrained(checkpoints / f"{name}_step{step}")
            loss, gradients = by_hand(str(checkpoints / f"{name}_step{step}"), batch, cfg)
            gradients = {n: torch.from_numpy(g) for n, g in gradients.items()}
            if step == 0:
                first = loss, as_stored(model, gradients)
            for n, p in model.named_parameters():
                p.grad = gradients[n].clone()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        found[name] = (*first, as_stored(model, dict(model.named_parameters())))
    return found


@pytest.fixture(scope="module")
def results(checkpoints, tmp_path_factory):
    """What every rank of every case found: name -> list. One spawn for all of one number of ranks and one speed, because
    imports take longest."""
    out, found = tmp_path_factory.mktemp("out"), {}

    def get(world, slow):
        key = world, slow
        if key not in found:
            found[key] = None  # ranks that failed are not started again for each of their cases
            cases = [
                (name, config(str(checkpoints / model), **changes), world)
                for name, model, w, changes in CASES
                if w == world and (name in SLOW) == slow
            ]
            mp.spawn(run_rank, args=(cases, str(out)), nprocs=world)
            found[key] = {
                n: [torch.load(f"{out}/{n}_{r}.pt", weights_only=False) for r in range(world)]
                for n, *_ in cases
            }
        assert found[key] is not None, f"the ranks failed in an earlier test of {world} ranks"
        return found[key], out

    return get


def assembled(ranks, key):
    """Whole tensors by name from the pieces of all ranks, by the plan of the stream, which refuses gaps and doubles."""
    pieces = [[WeightPiece(*p) for p, _ in r[key]] for r in ranks]
    data = {p: block for r in ranks for p, block in ((WeightPiece(*p), b) for p, b in r[key])}
    whole = {}
    for slot in (
        slot for bucket in BucketPlan.build(pieces, 1 << 12).buckets for slot in bucket.slots
    ):
        into = whole.setdefault(
            slot.piece.name, np.empty(slot.piece.shape, data[slot.source].dtype)
        )
        block = slot.piece.slice_of(torch.from_numpy(data[slot.source]), slot.source.start)
        slot.piece.slice_of(torch.from_numpy(into)).copy_(block)
    return whole


def assert_close(got, want, rtol):
    assert got.keys() == want.keys()
    error = {n: np.linalg.norm(got[n].astype(np.float64) - want[n]) for n in want}
    norm = {n: np.linalg.norm(want[n].astype(np.float64)) for n in want}
    assert np.linalg.norm(list(error.values())) <= rtol * np.linalg.norm(list(norm.values()))
    for n in want:
        assert error[n] <= 4 * rtol * max(norm[n], 1e-2), (n, error[n], norm[n])


@pytest.mark.parametrize(
    "name,model,world,changes",
    [pytest.param(*c, id=c[0], marks=[pytest.mark.slow] * (c[0] in SLOW)) for c in CASES],
)
def test_any_layout_equals_hugging_face(
    checkpoints, reference, results, name, model, world, changes
):
    all_of_world, out = results(world, name in SLOW)
    compare(checkpoints, reference[model], all_of_world[name], out, name, model, world, changes)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU; this machine has none")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("dtype", "near"), [("fp32", 1e-3), ("bf16", 0.1)])
def test_transformer_engine_equals_hugging_face(
    checkpoints, reference, tmp_path, model, dtype, near
):
    """One GPU: the layers of Transformer Engine, its optimiser, and NCCL."""
    pytest.importorskip("transformer_engine", reason="Transformer Engine is not installed")
    name, _, world, changes = case(f"{model}_{dtype}_plain", model, 1)
    cfg = config(str(checkpoints / model), **changes)
    mp.spawn(run_rank, args=([(name, cfg, world)], str(tmp_path), "cuda"), nprocs=1)
    ranks = [torch.load(tmp_path / f"{name}_0.pt", weights_only=False)]
    compare(checkpoints, reference[model], ranks, tmp_path, name, model, world, changes, near)


def compare(checkpoints, by_hf, ranks, out, name, model, world, changes, near=None):
    path, (loss, gradients, weights) = str(checkpoints / model), by_hf
    plain, batch = hf_model(path), make_batch(path)
    rough = changes["model__dtype"] == "bfloat16"
    near = near or (0.1 if rough else 1e-5)
    union = {}
    for r in ranks:
        assert not union.keys() & r["log_probs"].keys()
        union |= r["log_probs"]
        told = [
            {k: v for k, v in x["metrics"].items() if not k.endswith("_s")} for x in (r, ranks[0])
        ]
        assert told[0] == told[1] and r["skipped"] == 1 and r["same"]
        assert r["views"], "the stream is of what the rank holds, nothing gathered"
        assert r["squares"].keys() == r["log_probs"].keys() and bool(r["scores"]) == bool(
            r["log_probs"]
        )
    assert sorted(union) == list(range(len(batch.samples)))
    with torch.no_grad():
        for i, s in enumerate(batch.samples):
            np.testing.assert_allclose(
                union[i], hf_log_probs(plain, s, 0.7).numpy(), atol=near, rtol=0
            )
            ids = torch.from_numpy(np.concatenate([s.prompt_ids, s.response_ids])).long()
            logits = plain(ids[None], use_cache=False).logits[0]
            squares = (
                (logits / 0.7).softmax(-1).square().sum(-1)[len(s.prompt_ids) - 1 : -1].numpy()
            )
            for r in (r for r in ranks if i in r["squares"]):
                np.testing.assert_allclose(
                    r["squares"][i], np.stack([union[i], squares], -1), atol=near, rtol=0
                )
            want = (
                plain(ids[None, len(s.prompt_ids) :], use_cache=False)
                .logits[0, :-1]
                .log_softmax(-1)
            )
            want = want.gather(1, ids[len(s.prompt_ids) + 1 :, None])[:, 0].numpy()
            for r in (r for r in ranks if r["scores"]):
                np.testing.assert_allclose(r["scores"][i], want, atol=near, rtol=0)
    assert ranks[0]["metrics"]["actor/loss"] == pytest.approx(
        loss, abs=near / 10 if rough else near
    )
    norm = np.linalg.norm([np.linalg.norm(g) for g in gradients.values()])
    assert ranks[0]["metrics"]["actor/grad_norm"] == pytest.approx(norm, rel=near)
    assert ranks[0]["metrics"]["actor/tokens"] == sum(int(s.loss_mask.sum()) for s in batch.samples)
    stored = as_stored(plain, dict(plain.named_parameters()))
    for n, tensor in assembled(ranks, "pieces").items():
        want = stored.pop(n)
        want = torch.from_numpy(want).bfloat16().float().numpy() if rough else want
        np.testing.assert_array_equal(tensor, want)
    assert not stored
    if ranks[0]["gradients"] is not None:
        assert_close(assembled(ranks, "gradients"), gradients, near)
    trained = assembled(ranks, "weights")
    assert_close(trained, weights, 0.01 if rough else 10 * near)
    saved = hf_model(f"{out}/{name}_hf")
    for n, tensor in as_stored(saved, dict(saved.named_parameters())).items():
        np.testing.assert_array_equal(tensor, trained[n])
    total = sum(t.nbytes for t in trained.values())
    for r in ranks:
        assert (
            sum(block.nbytes for _, block in r["weights"]) < total * (1 if world == 1 else 0.75) + 1
        )


def test_experts_and_tensor_parallelism_need_sequence_parallelism(checkpoints):
    changes = {"actor__backend": "megatron", "actor__tensor_parallel_size": 2}
    with pytest.raises(ConfigError, match="actor.sequence_parallel=false.*needs it true"):
        read_config(config(str(checkpoints / "moe"), **changes), "actor")
    read_config(config(str(checkpoints / "moe"), **changes, actor__sequence_parallel=True), "actor")
    read_config(config(str(checkpoints / "qwen2"), **changes), "actor")


@pytest.mark.parametrize(
    ("model", "odd", "layout", "words"),
    [
        (
            "gemma",
            {},
            {},
            "model type gemma is none of llama, qwen2, qwen3, qwen3_moe; use backend=fsdp",
        ),
        ("llama", {"hidden_act": "gelu"}, {}, "its hidden_act=gelu is not known"),
        ("llama", {"mlp_bias": True}, {}, "its mlp_bias=True"),
        ("qwen3", {"attention_bias": True}, {}, "its attention_bias=True"),
        ("qwen2", {"use_sliding_window": True}, {}, "its use_sliding_window=True"),
        (
            "llama",
            {"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0}},
            {},
            "its rope_parameters=",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            {},
            "its rope_parame",
        ),
        (
            "llama",
            {"num_key_value_heads": 1},
            TP,
            "actor.tensor_parallel_size=2 does not divide the 1 key-value heads .*use a size that does",
        ),
        (
            "llama",
            {"intermediate_size": 41},
            TP,
            "actor.tensor_parallel_size=2 does not divide the 41 columns",
        ),
        (
            "llama",
            {"num_hidden_layers": 3},
            PP,
            "actor.pipeline_parallel_size=2 does not divide the 3 layers",
        ),
        (
            "llama",
            {"num_hidden_layers": 6},
            {**PP, **VPP},
            "pipeline_parallel_size=2, in all 4 stages, does not divide",
        ),
        (
            "qwen3",
            {},
            EP,
            "actor.expert_parallel_size=2: .* is a dense model, without experts; set it to 1",
        ),
    ],
)
def test_models_that_megatron_would_make_otherwise_are_refused(tmp_path, model, odd, layout, words):
    transformers.AutoConfig.for_model(model, **SIZES | odd).save_pretrained(tmp_path)
    changes = {"actor__backend": "megatron"} | {f"actor__{k}": v for k, v in layout.items()}
    with pytest.raises(
        ConfigError, match="no model.safetensors, the only format" if model != "gemma" else words
    ):
        read_config(config(str(tmp_path), **changes), "actor")
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=words):
        read_config(config(str(tmp_path), **changes), "actor")


def test_weights_of_another_shape_are_refused(tmp_path):
    safetensors.torch.save_file(
        {"a": torch.zeros(4, 2), "b": torch.zeros(4, 3)}, tmp_path / "m.safetensors"
    )
    reader = megatron_weights.CheckpointReader("critic.path", str(tmp_path))
    piece = WeightPiece("a", "float32", (4, 2), 1, 3)
    assert reader.read(piece).shape == (2, 2)
    with pytest.raises(
        ConfigError, match=r"critic.path: b of .* is \(4, 3\), but its config.json says \(4, 2\)"
    ):
        reader.read(dataclasses.replace(piece, name="b"))


def test_the_token_budget_counts_what_a_rank_has_of_a_sequence():
    """On two context-parallel ranks each has half of it, so twice the sequences fit."""
    for changes, micros in (({}, 4), ({"actor__context_parallel_size": 2}, 2)):
        cfg = config("", actor__backend="megatron", actor__micro_batch_tokens=20, **changes)
        worker = WORKERS["actor"](cfg, "actor", 0, 2, "cpu", total_steps=1)
        worker.packed = False
        assert len(worker._micro_batch_plan([10] * 8, 1)[0]) == micros


# ---- the other roles --------------------------------------------------------------------------------------------


def with_values(path):
    batch, rng = make_batch(path), np.random.default_rng(1)
    batch.values, batch.returns = (
        [rng.normal(0, 1, len(s.loss_mask)) for s in batch.samples] for _ in range(2)
    )
    return batch


def found_by(worker, role, path):
    """What the role is asked for, and of a critic again after two updates."""
    batch = with_values(path)
    if role == "reward_model":
        return {"answers": [worker.score_sequences([s.response_ids for s in batch.samples])]}
    if role == "ref":
        return {"answers": [worker.log_prob(batch)]}
    before, told = worker.values(batch), [worker.update(batch), worker.update(batch)]
    told = [{k: v for k, v in x.items() if not k.endswith("_s")} for x in told]
    return {"answers": [before, worker.values(batch)], "told": told}


def run_roles(rank, cases, out):
    torch.set_num_threads(1)
    for name, role, cfg in cases:
        worker = WORKERS[role](cfg, role, rank, 2, "cpu", total_steps=10)
        join(worker, f"{name}_{role}", out)
        torch.save(found_by(worker, role, cfg.model.path), f"{out}/{name}_{role}_{rank}.pt")
        end()


def test_the_other_roles_equal_the_fsdp_back_end(checkpoints, tmp_path):
    """A critic, a reward model and a reference, each on several layouts of two ranks, and on one rank under FSDP."""
    path, scalar = str(checkpoints / "qwen2"), str(checkpoints / "scalar")
    torch.manual_seed(2)
    plain = MODELS["qwen2"]()
    plain.num_labels = 1
    transformers.AutoModelForSequenceClassification.from_config(plain).save_pretrained(scalar)
    layouts = {"tp2": TP, "tp2_sp": {**TP, **SP}, "pp2": PP, "cp2": CP, "dp2": {}}
    changes = {
        "critic__path": scalar,
        "critic__lr": 1e-3,
        "reward_model__path": scalar,
        "actor__micro_batch_tokens": 60,
    }
    roles, cases = ("critic", "reward_model", "ref"), []
    for name, layout in layouts.items():
        own = {f"actor__{k}": v for k, v in layout.items()} | {"actor__backend": "megatron"}
        cases += [(name, role, config(path, **changes, **own)) for role in roles]
    mp.spawn(run_roles, args=(cases, str(tmp_path)), nprocs=2)
    for role in roles:
        worker = start(config(path, **changes), role, cls=FSDP_WORKERS[role])
        want = found_by(worker, role, path)
        dist.destroy_process_group()
        for name in layouts:
            ranks = [
                torch.load(f"{tmp_path}/{name}_{role}_{r}.pt", weights_only=False) for r in range(2)
            ]
            for k, answers in enumerate(want["answers"]):
                union = ranks[0]["answers"][k] | ranks[1]["answers"][k]
                assert sorted(union) == list(range(12))
                for i, answer in answers.items():
                    np.testing.assert_allclose(
                        union[i], answer, atol=1e-4 if k else 1e-5, rtol=0, err_msg=f"{name} {role}"
                    )
            for k, told in enumerate(want.get("told", ())):
                assert ranks[0]["told"][k] == ranks[1]["told"][k]
                assert ranks[0]["told"][k] == pytest.approx(told, rel=1e-3, abs=1e-5)


def test_a_reward_model_without_a_head_is_refused(checkpoints):
    changes = {"actor__backend": "megatron", "reward_model__path": str(checkpoints / "llama")}
    with pytest.raises(ConfigError, match="reward_model.path: .*lacks the weight score.weight"):
        start(
            config(str(checkpoints / "qwen2"), **changes),
            "reward_model",
            cls=WORKERS["reward_model"],
        )
    end()


# ---- checkpoints ------------------------------------------------------------------------------------------------


def run_checkpoint(rank, cases, folder):
    """Cases in turn: train one update, save; load in another layout; both go on for one more update."""
    torch.set_num_threads(1)
    for name, cfg, world, load in cases:
        role = "critic" if name.startswith("critic") else "actor"
        worker = WORKERS[role](cfg, role, rank, world, "cpu", total_steps=10)
        join(worker, name, folder)
        batch = with_values(cfg.model.path)
        if load:
            worker.load_state(f"{folder}/{load}")
        else:
            if name != "fresh":
                worker.update(batch)
            (folder / name).mkdir(exist_ok=True)
            worker.save_state(f"{folder}/{name}")
            worker.saved()
        result = {"before": held_by(worker), "at": (worker.version, worker.optimizer_steps)}
        groups = (
            group
            for inner in worker.optimizer.chained_optimizers
            for group in inner.optimizer.param_groups
        )
        result["masters"] = [p.detach().clone() for group in groups for p in group["params"]]
        worker.update(batch)
        torch.save(result | {"after": held_by(worker)}, f"{folder}/{name}_{rank}.pt")
        end()


def held_by(worker):
    """As `sent_by`, of a role that streams nothing too."""
    parts = megatron_weights.share_of(
        megatron_weights.parts(worker.models, worker.hf_config, "float32")
    )
    return [
        (dataclasses.astuple(p), t.detach().float().clone().reshape(p.block_shape).numpy())
        for p, t in parts
    ]


@pytest.mark.slow
def test_a_checkpoint_loads_in_another_layout(checkpoints, tmp_path):
    """Saved on TP=2; read on TP=2, PP=2, virtual stages, CP=2 and two replicas: the same weights, then the same step. The
    same of a critic and, saved with its experts spread out, of a mixture of experts."""
    layouts = {
        "saved": ("qwen2", TP, ""),
        "tp2": ("qwen2", TP, "saved"),
        "pp2": ("qwen2", PP, "saved"),
        "vpp2": ("qwen2", {**PP, **VPP}, "saved"),
        "cp2": ("qwen2", CP, "saved"),
        "dp2": ("qwen2", {}, "saved"),
        "vpp2_saved": ("qwen2", {**PP, **VPP}, ""),
        "tp2_of_vpp2": ("qwen2", TP, "vpp2_saved"),
        "critic_saved": ("qwen2", TP, ""),
        "critic_pp2": ("qwen2", PP, "critic_saved"),
        "bf16_saved": ("qwen2", TP, ""),
        "bf16_tp2": ("qwen2", TP, "bf16_saved"),
        "bf16_pp2": ("qwen2", PP, "bf16_saved"),
        "fresh": ("qwen2", TP, ""),
        "of_fresh": ("qwen2", TP, "fresh"),
        "moe_saved": ("moe", EP, ""),
        "moe_tp2": ("moe", {**TP, **SP}, "moe_saved"),
        "moe_tp2_ep2": ("moe", {**TP, **SP, **EP}, "moe_saved"),
    }
    cases = []
    for name, (model, layout, load) in layouts.items():
        _, _, world, changes = case(name, model, 2, **layout)
        changes["critic__lr"] = 1e-3
        cases.append((name, config(str(checkpoints / model), **changes), world, load))
    mp.spawn(run_checkpoint, args=(cases, tmp_path), nprocs=2)
    found = {
        n: [torch.load(f"{tmp_path}/{n}_{r}.pt", weights_only=False) for r in range(2)]
        for n in layouts
    }
    for name, saved in ((name, load) for name, (_, _, load) in layouts.items() if load):
        before, after = (assembled(found[saved], key) for key in ("before", "after"))
        assert any((before[n] != after[n]).any() for n in before)
        assert found[name][0]["at"] == ((0, 0) if saved == "fresh" else (1, 1))
        for n, tensor in assembled(found[name], "before").items():
            np.testing.assert_array_equal(tensor, before[n])
        # The moments came along: without them AdamW's second step would be another first one.
        near = 0.01 if name == "bf16_pp2" else 1e-6 if name in ("tp2", "bf16_tp2") else 1e-5
        assert_close(assembled(found[name], "after"), after, near)
    for was, now in zip(
        *([x for r in found[n] for x in r["masters"]] for n in ("bf16_saved", "bf16_tp2")),
        strict=True,
    ):
        assert torch.equal(was, now) and (was != was.bfloat16()).any(), (
            "float32, and none of it rounded"
        )
    # A checkpoint from before the first step leaves that step as it would have been.
    assert_close(assembled(found["fresh"], "after"), assembled(found["saved"], "before"), 1e-6)
