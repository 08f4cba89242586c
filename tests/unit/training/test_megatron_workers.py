"""The Megatron back end against plain Hugging Face models on one process: log-probs, gradients,
weights, in any layout."""

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from transformers.core_model_loading import revert_weight_conversion

pytest.importorskip("megatron.core", reason="megatron-core is not installed (the extra megatron)")

from one_step_off.training.megatron import megatron_weights
from one_step_off.training.megatron.megatron_workers import WORKERS
from tests.unit.forked_ranks import run_ranks
from tests.unit.training.fsdp_helpers import config, hf_log_probs, hf_model, make_batch
from tests.unit.training.megatron_helpers import (
    CP,
    DECAY,
    EP,
    EVERYTHING,
    MODELS,
    PACKED,
    PP,
    SP,
    TP,
    VPP,
    Case,
    Recorder,
    assembled,
    assert_close,
    case,
    end,
    sent_by,
)
from tests.unit.training.objective_by_hand import by_hand
from tests.unit.training.rank_helpers import join, without_times

STEPS = 3
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
    case("packed", "llama3", 1, **PACKED),
    case("tp2_sp_packed", "moe", 2, **TP, **SP, **PACKED),
    case("pp2_packed", "qwen3", 2, **PP, **PACKED, activation_checkpointing=True),
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
SLOW = {case.name for case in CASES if case.world == 4} | {
    *("tp2_qwen3", "tp2_sp", "tp2_sp_moe", "pp2_qwen3", "dp2_plain", "ep2_mixed")
}


def run_rank(rank, cases, out, device="cpu"):
    """In a process of its own: everything that the tests below ask about each (name, config,
    world)."""
    torch.set_num_threads(1)
    for name, cfg, world in cases:
        print(f"rank {rank}: {name}", flush=True)
        worker_class = WORKERS["actor"] if name.endswith("plain") else Recorder
        worker = worker_class(cfg, "actor", rank, world, device, total_steps=10)
        join(worker, name, out)
        assert worker.packed == ("packed" in name)
        result = results_of(worker, f"{out}/{name}_hf")
        torch.save(result, f"{out}/{name}_{rank}.pt")
        end()


def results_of(worker, hf_folder):
    """What a rank computes before, in and after `STEPS` updates and one that is skipped."""
    batch = make_batch(worker.cfg.model.path)
    result = {
        "pieces": sent_by(worker),
        "log_probs": worker.log_prob(batch),
        "squares": worker.log_prob_and_squares(batch),
        "scores": worker.score([s.response_ids for s in batch.samples]),
        "metrics": worker.update(batch),
        "gradients": getattr(worker, "gradients", None),
        "streams_live_weights": streams_live_weights(worker),
    }
    for _ in range(STEPS - 1):
        worker.update(batch)
    result["weights"] = sent_by(worker)
    worker.save_hf(hf_folder)
    broken = make_batch(worker.cfg.model.path)
    broken.advantages[0][:] = np.nan  # only one share has this sample; all ranks must skip
    result["skipped"] = worker.update(broken)["actor/skipped_updates"]
    result["unchanged"] = all(
        (after == before).all()
        for (_, after), (_, before) in zip(sent_by(worker), result["weights"], strict=True)
    )
    return result


def streams_live_weights(worker) -> bool:
    """Whether the pieces are views of the parameters that this rank holds; nothing is gathered."""
    parameters = [p for chunk in worker.models for p in chunk.parameters()]
    storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    parts = megatron_weights.parts(worker.models, worker.hf_config, "float32")
    return all(part.view.untyped_storage().data_ptr() in storages for part in parts)


def as_stored(model, tensors):
    """By the names of the checkpoint (transformers fuses experts)."""
    stored = revert_weight_conversion(model, tensors)
    return {name: tensor.detach().numpy() for name, tensor in stored.items()}


@pytest.fixture(scope="module")
def reference(megatron_models):
    """By plain Hugging Face and torch's AdamW, of each model: loss, gradients, weights after the
    steps."""
    return {name: trained_by_hand(megatron_models, name) for name in MODELS}


def trained_by_hand(folder, name):
    path = str(folder / name)
    batch = make_batch(path)
    cfg = config(path, **EVERYTHING)
    model = hf_model(path)
    matrices = {"params": [p for p in model.parameters() if p.ndim > 1]}
    vectors = {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW([matrices, vectors], lr=1e-3, weight_decay=DECAY)
    first_loss = None
    first_gradients = None
    for step in range(STEPS):
        step_folder = str(folder / f"{name}_step{step}")
        model.save_pretrained(step_folder)
        loss, arrays = by_hand(step_folder, batch, cfg)
        gradients = {n: torch.from_numpy(array) for n, array in arrays.items()}
        if step == 0:
            first_loss = loss
            first_gradients = as_stored(model, dict(gradients))
        for n, parameter in model.named_parameters():
            parameter.grad = gradients[n].clone()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return first_loss, first_gradients, as_stored(model, dict(model.named_parameters()))


@pytest.fixture(scope="module")
def results(megatron_models, tmp_path_factory):
    """results(world, slow) -> what every rank of every such case computed: name -> list; and the
    folder.

    One start for all of one number of ranks and one speed.
    """
    out = tmp_path_factory.mktemp("out")
    computed = {}

    def get(world, slow):
        key = (world, slow)
        if key not in computed:
            computed[key] = None  # ranks that failed are not started again for each of their cases
            computed[key] = run_cases(world, slow)
        assert computed[key] is not None, f"the ranks failed in an earlier test of {world} ranks"
        return computed[key], out

    def run_cases(world, slow):
        chosen = [c for c in CASES if c.world == world and (c.name in SLOW) == slow]
        cases = []
        for c in chosen:
            cfg = config(str(megatron_models / c.model), **c.changes)
            cases.append((c.name, cfg, world))
        run_ranks(run_rank, (cases, str(out)), world)
        return {c.name: load_results(out, c.name, world) for c in chosen}

    return get


def load_results(folder, name, world):
    return [torch.load(f"{folder}/{name}_{rank}.pt", weights_only=False) for rank in range(world)]


def as_parameter(c: Case):
    marks = [pytest.mark.slow] if c.name in SLOW else []
    return pytest.param(c, id=c.name, marks=marks)


@pytest.mark.parametrize("tested", [as_parameter(c) for c in CASES])
def test_any_layout_equals_hugging_face(megatron_models, reference, results, tested):
    all_of_world, out = results(tested.world, tested.name in SLOW)
    compare(megatron_models, reference[tested.model], all_of_world[tested.name], out, tested)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU; this machine has none")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("fp32", 1e-3), ("bf16", 0.1), ("bf16_packed", 0.1)]
)
def test_transformer_engine_equals_hugging_face(
    megatron_models, reference, tmp_path, model, dtype, tolerance
):
    """One GPU: the layers of Transformer Engine, its optimizer, and NCCL."""
    pytest.importorskip("transformer_engine", reason="Transformer Engine is not installed")
    layout = PACKED if "packed" in dtype else {"packing": "off"}
    tested = case(f"{model}_{dtype}_plain", model, 1, **layout)
    cfg = config(str(megatron_models / model), **tested.changes)
    mp.spawn(run_rank, args=([(tested.name, cfg, 1)], str(tmp_path), "cuda"), nprocs=1)
    ranks = load_results(tmp_path, tested.name, 1)
    compare(megatron_models, reference[model], ranks, tmp_path, tested, tolerance)


def compare(folder, by_hf, ranks, out, tested, tolerance=None):
    """All that the ranks computed against the reference.

    Args:
        by_hf: of `trained_by_hand`.
        ranks: of `results_of`, one per rank.
        out: the folder with the exported model.
        tolerance: None: by the dtype of the case.
    """
    loss, gradients, weights = by_hf
    is_bf16 = tested.changes["model__dtype"] == "bfloat16"
    if tolerance is None:
        tolerance = 0.1 if is_bf16 else 1e-5
    path = str(folder / tested.model)
    model = hf_model(path)
    compare_ranks(ranks)
    compare_log_probs(ranks, model, make_batch(path), tolerance)
    metrics = ranks[0]["metrics"]
    assert metrics["actor/loss"] == pytest.approx(
        loss, abs=tolerance / 10 if is_bf16 else tolerance
    )
    norm = np.linalg.norm([np.linalg.norm(gradient) for gradient in gradients.values()])
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=tolerance)
    trained_tokens = sum(int(s.loss_mask.sum()) for s in make_batch(path).samples)
    assert metrics["actor/tokens"] == trained_tokens
    compare_pieces(assembled(ranks, "pieces"), model, is_bf16)
    if ranks[0]["gradients"] is not None:
        assert_close(assembled(ranks, "gradients"), gradients, tolerance)
    trained = assembled(ranks, "weights")
    assert_close(trained, weights, 0.01 if is_bf16 else 10 * tolerance)
    exported = hf_model(f"{out}/{tested.name}_hf")
    for name, tensor in as_stored(exported, dict(exported.named_parameters())).items():
        np.testing.assert_array_equal(tensor, trained[name])
    whole_bytes = sum(tensor.nbytes for tensor in trained.values())
    largest_share = 1 if tested.world == 1 else 0.75
    for rank in ranks:
        sent_bytes = sum(block.nbytes for _, block in rank["weights"])
        assert sent_bytes < whole_bytes * largest_share + 1


def compare_ranks(ranks):
    """What must be the same on every rank, or hold for each."""
    for rank in ranks:
        assert without_times(rank["metrics"]) == without_times(ranks[0]["metrics"])
        assert rank["skipped"] == 1
        assert rank["unchanged"]
        assert rank["streams_live_weights"], (
            "the stream is of what the rank holds, nothing gathered"
        )
        assert rank["squares"].keys() == rank["log_probs"].keys()
        assert bool(rank["scores"]) == bool(rank["log_probs"])


def compare_log_probs(ranks, model, batch, tolerance):
    log_probs = {}
    for rank in ranks:
        assert not log_probs.keys() & rank["log_probs"].keys()
        log_probs |= rank["log_probs"]
    assert sorted(log_probs) == list(range(len(batch.samples)))
    for i, sample in enumerate(batch.samples):
        with torch.no_grad():
            expected = hf_log_probs(model, sample, 0.7).numpy()
            squares = hf_squares(model, sample, 0.7)
            scores = hf_scores(model, sample)
        np.testing.assert_allclose(log_probs[i], expected, atol=tolerance, rtol=0)
        both = np.stack([log_probs[i], squares], -1)
        for rank in ranks:
            if i in rank["squares"]:
                np.testing.assert_allclose(rank["squares"][i], both, atol=tolerance, rtol=0)
            if rank["scores"]:
                np.testing.assert_allclose(rank["scores"][i], scores, atol=tolerance, rtol=0)


def hf_squares(model, sample, temperature):
    """sum_v p(v)^2 at the response tokens."""
    ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids])).long()
    logits = model(ids[None], use_cache=False).logits[0]
    squares = (logits / temperature).softmax(-1).square().sum(-1)
    return squares[len(sample.prompt_ids) - 1 : -1].numpy()


def hf_scores(model, sample):
    """Log-probs at temperature 1 of the response alone, of all its tokens but the first."""
    ids = torch.from_numpy(sample.response_ids).long()
    log_probs = model(ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
    return log_probs.gather(1, ids[1:, None])[:, 0].numpy()


def compare_pieces(tensors, model, is_bf16):
    """The stream before any update is the checkpoint, bit for bit."""
    stored = as_stored(model, dict(model.named_parameters()))
    assert tensors.keys() == stored.keys()
    for name, tensor in tensors.items():
        expected = stored[name]
        if is_bf16:
            expected = torch.from_numpy(expected).bfloat16().float().numpy()
        np.testing.assert_array_equal(tensor, expected)


def test_the_token_budget_counts_a_rank_s_part_of_a_sequence():
    """On two context-parallel ranks each has half of it, so twice the sequences fit."""
    for changes, micro_batches in (({}, 4), ({"actor__context_parallel_size": 2}, 2)):
        cfg = config("", actor__backend="megatron", actor__micro_batch_tokens=20, **changes)
        worker = WORKERS["actor"](cfg, "actor", 0, 2, "cpu", total_steps=1)
        worker.packed = False
        assert len(worker._micro_batch_plan([10] * 8, 1)[0]) == micro_batches
