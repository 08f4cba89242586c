"""The Megatron back end's critic, reward model, reference and teacher against the FSDP ones."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers

pytest.importorskip("megatron.core", reason="megatron-core is not installed (the extra megatron)")

from one_step_off.config.errors import ConfigError
from one_step_off.training.fsdp.fsdp_workers import WORKERS as FSDP_WORKERS
from one_step_off.training.megatron.megatron_workers import WORKERS
from tests.unit.forked_ranks import run_ranks
from tests.unit.training.fsdp_helpers import config, start
from tests.unit.training.megatron_helpers import CP, MODELS, PACKED, PP, SP, TP, end, with_values
from tests.unit.training.rank_helpers import join, without_times

ROLES = ("critic", "reward_model", "ref", "teacher")
LAYOUTS = {"tp2": TP, "tp2_sp": {**TP, **SP}, "pp2_packed": {**PP, **PACKED}, "cp2": CP, "dp2": {}}
SAMPLES = 12


def answers_of(worker, role, path):
    """What the role is asked for; of a critic also after two updates, whose metrics are beside the
    answers."""
    batch = with_values(path)
    if role == "reward_model":
        return {"answers": [worker.score_sequences([s.response_ids for s in batch.samples])]}
    if role == "ref":
        return {"answers": [worker.log_prob(batch)]}
    if role == "teacher":
        return {"answers": [worker.score_responses(batch)]}
    before = worker.values(batch)
    metrics = [without_times(worker.update(batch)) for _ in range(2)]
    return {"answers": [before, worker.values(batch)], "metrics": metrics}


def run_roles(rank, cases, out):
    torch.set_num_threads(1)
    for name, role, cfg in cases:
        worker = WORKERS[role](cfg, role, rank, 2, "cpu", total_steps=10)
        join(worker, f"{name}_{role}", out)
        answers = answers_of(worker, role, cfg.model.path)
        torch.save(answers, f"{out}/{name}_{role}_{rank}.pt")
        end()


def write_classifier(path):
    """A sequence classifier of the qwen2 model's sizes."""
    torch.manual_seed(2)
    hf_config = MODELS["qwen2"]()
    hf_config.num_labels = 1
    model = transformers.AutoModelForSequenceClassification.from_config(hf_config)
    model.save_pretrained(path)


def test_the_other_roles_equal_the_fsdp_back_end(megatron_models, tmp_path):
    """Each role on several layouts of two ranks, and on one rank under FSDP."""
    path = str(megatron_models / "qwen2")
    scalar = str(tmp_path / "scalar")
    write_classifier(scalar)
    changes = {
        "critic__path": scalar,
        "critic__lr": 1e-3,
        "reward_model__path": scalar,
        "actor__micro_batch_tokens": 60,
    }
    cases = []
    for name, layout in LAYOUTS.items():
        keys = {f"actor__{key}": value for key, value in layout.items()}
        for role in ROLES:
            cases.append((name, role, config(path, **changes, **keys, actor__backend="megatron")))
    run_ranks(run_roles, (cases, str(tmp_path)), 2)
    for role in ROLES:
        worker = start(config(path, **changes), role, cls=FSDP_WORKERS[role])
        expected = answers_of(worker, role, path)
        dist.destroy_process_group()
        for name in LAYOUTS:
            files = [f"{tmp_path}/{name}_{role}_{rank}.pt" for rank in range(2)]
            ranks = [torch.load(file, weights_only=False) for file in files]
            compare(ranks, expected, f"{name} {role}")


def compare(ranks, expected, what):
    for step, answers in enumerate(expected["answers"]):
        union = ranks[0]["answers"][step] | ranks[1]["answers"][step]
        assert sorted(union) == list(range(SAMPLES))
        tolerance = 1e-4 if step else 1e-5
        for i, answer in answers.items():
            np.testing.assert_allclose(union[i], answer, atol=tolerance, rtol=0, err_msg=what)
    for step, metrics in enumerate(expected.get("metrics", ())):
        first, second = (rank["metrics"][step] for rank in ranks)
        assert first == second
        assert first == pytest.approx(metrics, rel=1e-3, abs=1e-5)


def test_a_reward_model_without_a_head_is_refused(megatron_models):
    changes = {"actor__backend": "megatron", "reward_model__path": str(megatron_models / "llama")}
    cfg = config(str(megatron_models / "qwen2"), **changes)
    with pytest.raises(ConfigError, match="reward_model.path: .*lacks the weight score.weight"):
        start(cfg, "reward_model", cls=WORKERS["reward_model"])
    end()
