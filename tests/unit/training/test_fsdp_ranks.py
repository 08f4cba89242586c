"""The FSDP back end on several ranks: the same update as on one, and every row streamed once."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.unit.forked_ranks import run_ranks
from tests.unit.training.fsdp_helpers import (
    OBJECTIVES,
    Recorder,
    assert_gradients_equal,
    config,
    end,
    hf_log_probs,
    hf_model,
    make_batch,
    whole,
)
from tests.unit.training.rank_helpers import join, without_times

EVERYTHING = OBJECTIVES["everything"]


def run_rank(rank, world, cases, out):
    """In a process of its own: all that the tests below ask about each case, name -> config."""
    torch.set_num_threads(1)
    for name, cfg in cases.items():
        worker = Recorder(cfg, "actor", rank, world, "cpu", total_steps=10)
        join(worker, name, out)
        assert worker.packed == (cfg.actor.packing == "on")
        torch.save(results_of(worker, f"{out}/{name}_hf"), f"{out}/{name}_{rank}.pt")
        end()


def results_of(worker, hf_folder):
    """What a rank computes before, in and after an update, and in one that is skipped."""
    path = worker.cfg.model.path
    batch = make_batch(path)
    result = {
        "pieces": [
            (dataclasses.astuple(piece), tensor.clone().numpy())
            for piece, tensor in zip(worker.weight_plan(), worker.weight_tensors(), strict=True)
        ],
        "log_probs": worker.log_prob(batch),
        "squares": worker.log_prob_and_squares(batch),
        "scores": worker.score([s.response_ids for s in batch.samples]),
        "metrics": worker.update(batch),
        "weights": whole(worker),
        "gradients": worker.gradients,
    }
    worker.save_hf(hf_folder)
    broken = make_batch(path)
    broken.advantages[0][:] = np.nan  # only one rank has this sample; all must skip
    result["skipped"] = worker.update(broken)["actor/skipped_updates"]
    after = whole(worker)
    result["unchanged"] = all((after[name] == result["weights"][name]).all() for name in after)
    return result


def run_world(world, cases, out):
    """What every rank computed: name of the case -> list."""
    run_ranks(run_rank, (world, cases, str(out)), world)
    results = {}
    for name in cases:
        files = [f"{out}/{name}_{rank}.pt" for rank in range(world)]
        results[name] = [torch.load(file, weights_only=False) for file in files]
    return results


def check_world(results, path, one_rank, hf_folder):
    """Everything that the ranks computed against the update on one rank and the plain model."""
    gradients, metrics, weights = one_rank
    for result in results:
        assert_gradients_equal(result["gradients"], gradients)
        for key, value in without_times(result["metrics"]).items():
            assert value == pytest.approx(metrics[key], rel=1e-4, abs=1e-6), key
        assert result["metrics"] == results[0]["metrics"], "metrics must be equal on every rank"
        assert result["skipped"] >= 1
        assert result["unchanged"]
    model = hf_model(path)
    check_log_probs(results, model, make_batch(path))
    check_pieces(results, model)
    saved = hf_model(hf_folder)
    for name, parameter in saved.named_parameters():
        exported = parameter.detach().numpy()
        np.testing.assert_array_equal(exported, results[0]["weights"][name])
        np.testing.assert_allclose(exported, weights[name], atol=5e-6)


def check_log_probs(results, model, batch):
    log_probs = {}
    for result in results:
        assert not log_probs.keys() & result["log_probs"].keys()
        log_probs |= result["log_probs"]
        assert result["squares"].keys() == result["log_probs"].keys()
        for i, both in result["squares"].items():
            assert (both[:, 0] == result["log_probs"][i]).all()
            # The squares of the chosen token and of all others.
            assert (both[:, 1] > np.exp(2 * both[:, 0])).all()
    assert sorted(log_probs) == list(range(len(batch.samples)))
    for i, sample in enumerate(batch.samples):
        with torch.no_grad():
            expected = hf_log_probs(model, sample, 0.7).numpy()
        np.testing.assert_allclose(log_probs[i], expected, atol=1e-5, rtol=0)
    for first, last in zip(results[0]["scores"], results[-1]["scores"], strict=True):
        np.testing.assert_array_equal(first, last)


def check_pieces(results, model):
    """The pieces of all ranks make up the checkpoint, bit by bit, each row once."""
    parameters = dict(model.named_parameters())
    built = {name: np.full(p.shape, np.nan, np.float32) for name, p in parameters.items()}
    for result in results:
        for (name, dtype, shape, start_row, stop_row, _), rows in result["pieces"]:
            assert dtype == "float32"
            assert shape == tuple(parameters[name].shape)
            assert rows.shape[0] == stop_row - start_row > 0
            assert np.isnan(built[name][start_row:stop_row]).all(), "a row came twice"
            built[name][start_row:stop_row] = rows
    for name, parameter in parameters.items():
        np.testing.assert_array_equal(built[name], parameter.detach().numpy())


def test_two_ranks_equal_one(model_folders, one_rank_update, tmp_path):
    cases = {
        "tied": config(model_folders["tied"], **EVERYTHING),
        "untied": config(model_folders["untied"], **EVERYTHING, actor__micro_batch_tokens=40),
        # FSDP's hooks and recomputed layers pass the boundaries of sequences on.
        "packed": config(
            model_folders["tied"],
            **EVERYTHING,
            actor__packing="on",
            actor__activation_checkpointing=True,
            actor__micro_batch_tokens=60,
        ),
    }
    results = run_world(2, cases, tmp_path)
    for name in cases:
        model = "untied" if name == "untied" else "tied"
        check_world(
            results[name], model_folders[model], one_rank_update[model], f"{tmp_path}/{name}_hf"
        )


@pytest.mark.slow
def test_four_ranks_and_hsdp_equal_one(model_folders, one_rank_update, tmp_path):
    """Shards with uneven ends, empty micro-batches, and two replicas that share the sending."""
    cases = {
        "untied": config(model_folders["untied"], **EVERYTHING, actor__micro_batch_tokens=40),
        "tied": config(model_folders["tied"], **EVERYTHING, actor__fsdp_size=2),
    }
    results = run_world(4, cases, tmp_path)
    for name in cases:
        check_world(
            results[name], model_folders[name], one_rank_update[name], f"{tmp_path}/{name}_hf"
        )
    sent = [sum(block.size for _, block in result["pieces"]) for result in results["tied"]]
    first = sum(sent[:2])
    second = sum(sent[2:])
    assert min(first, second) > 0.3 * (first + second), "the replicas send about as much"
    names = [{piece[0] for piece, _ in result["pieces"]} for result in results["tied"]]
    first_names = names[0] | names[1]
    second_names = names[2] | names[3]
    assert not first_names & second_names, "each tensor by the ranks of one replica"
