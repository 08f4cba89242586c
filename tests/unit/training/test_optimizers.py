"""Optimizers by name: each takes the step of its reference, on any number of ranks; a run that is
resumed has the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from one_step_off.config import packages
from one_step_off.models import weight_checks
from one_step_off.models.parameter_kinds import parameter_kinds
from one_step_off.training import optimizer_trial, optimizers
from one_step_off.training.fsdp.fsdp_workers import CriticWorker, PolicyWorker
from one_step_off.training.muon import Muon, local
from tests.unit.forked_ranks import run_ranks
from tests.unit.training.fsdp_helpers import config, end, free_port, make_batch, whole
from tests.unit.training.optimizer_helpers import (
    NAMES,
    assert_equal,
    config_of,
    steps,
    whole_state,
    write_wide_model,
)
from tests.unit.training.rank_helpers import join

OWN = "tests.unit.training.own_optimizers"
SHAPES = [(6, 4), (4, 9), (7, 7), (300,), (50, 20)]
SETTINGS = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}


def needs(name):
    if name == "adamw_8bit":
        pytest.importorskip("torchao", reason="torchao is not installed (the extra)")


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory):
    return write_wide_model(tmp_path_factory.mktemp("wide"))


# The references.


def parameters_of(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def three_steps(parameters, *taken):
    """Three steps of these optimizers with gradients that are always the same."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for optimizer in taken:
            optimizer.step()


@pytest.mark.parametrize("adjustment", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_takes_torchs_steps(adjustment, nesterov):
    own = parameters_of(SHAPES)
    groups = optimizers.decaying_and_not(own[3:])
    muon_settings = {"momentum": 0.9, "nesterov": nesterov, "adjust_lr_fn": adjustment}
    three_steps(own, Muon(own[:3], groups, **SETTINGS, **muon_settings))
    wanted = parameters_of(SHAPES)
    muon = torch.optim.Muon(wanted[:3], lr=1e-2, weight_decay=0.1, **muon_settings)
    adamw = torch.optim.AdamW(optimizers.decaying_and_not(wanted[3:]), **SETTINGS, fused=True)
    three_steps(wanted, muon, adamw)
    for a, b, start in zip(own, wanted, parameters_of(SHAPES), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, start)


@pytest.mark.parametrize("part_numbers", [1 << 16, 1600])
def test_adamw_8bit_takes_torchaos_steps(monkeypatch, part_numbers):
    """Also where it works on some rows after the others."""
    needs("adamw_8bit")
    from torchao.optim import AdamW8bit

    from one_step_off.training import eight_bit_adamw
    from one_step_off.training.eight_bit_adamw import EightBitAdamW

    monkeypatch.setitem(eight_bit_adamw.PART_NUMBERS, "cpu", part_numbers)
    shapes = [(32, 256), (8, 1024), (300,), (5, 256)]
    own = parameters_of(shapes)
    optimizer = EightBitAdamW(own, **SETTINGS)
    three_steps(own, optimizer)
    wanted = parameters_of(shapes)
    with torch.compiler.set_stance("force_eager"):
        three_steps(wanted, AdamW8bit(wanted, **SETTINGS))
    assert all(torch.equal(a, b) for a, b in zip(own, wanted, strict=True))
    quantized = [optimizer.state[p]["exp_avg"].__class__.__name__ for p in own]
    assert quantized == ["OptimState8bit", "OptimState8bit", "Tensor", "Tensor"]


def test_what_is_quantized_follows_from_the_whole_shape_alone():
    needs("adamw_8bit")
    from one_step_off.training.eight_bit_adamw import block_in_row

    cases = {
        (49152, 576): 192,
        (1024, 4096): 256,
        (896, 4864): 256,
        (4864, 896): 224,
        (4, 2, 512): 256,
        (4096,): None,
        (15, 256): None,
        (1 << 16, 8): None,
        (4096, 257): None,
    }
    assert {shape: block_in_row(torch.Size(shape), 256) for shape in cases} == cases
    assert block_in_row(torch.Size((1024, 4096)), 1000) == 512


# The split.


def test_hidden_matrices_are_muons_and_tables_are_not(model_folders, start_single):
    for name, heads in (("tied", []), ("untied", ["lm_head.weight"])):
        cfg = config(model_folders[name], actor__optimizer="muon")
        worker = start_single(cfg, cls=PolicyWorker)
        names = {id(p): n for n, p in worker.model.named_parameters()}
        kinds = parameter_kinds(worker.model)
        assert [names[id(p)] for p in kinds.others] == ["model.embed_tokens.weight", *heads]
        hidden = {names[id(p)].split(".")[-2] for p in kinds.hidden_matrices}
        assert hidden == {
            "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
        }  # fmt: skip
        assert all(p.ndim == 1 for p in kinds.vectors)
        groups = worker.optimizer.param_groups
        assert [g["uses_muon"] for g in groups] == [True, False, False]
        assert [g["weight_decay"] for g in groups] == [0.01, 0.01, 0.0]


def test_the_head_of_a_critic_is_adamws(model_folders, start_single):
    cfg = config(model_folders["tied"], actor__optimizer="muon")
    cfg.placement.roles["critic"] = "actor"
    worker = start_single(cfg, role="critic", cls=CriticWorker)
    names = {id(p): n for n, p in worker.model.named_parameters()}
    others = [names[id(p)] for p in parameter_kinds(worker.model).others]
    assert others == ["model.embed_tokens.weight", "score.weight"]
    assert isinstance(worker.optimizer, Muon)


def test_adamw_is_built_as_before(model_folders, start_single):
    worker = start_single(config(model_folders["tied"]), cls=PolicyWorker)
    trained = list(worker.model.parameters())
    assert type(worker.optimizer) is torch.optim.AdamW
    matrices, vectors = worker.optimizer.param_groups
    assert [id(p) for p in matrices["params"]] == [id(p) for p in trained if p.ndim > 1]
    assert [id(p) for p in vectors["params"]] == [id(p) for p in trained if p.ndim == 1]
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.01, 0.0)
    assert matrices["fused"] is True


# One rank: updates, learning rates, resume.


@pytest.mark.parametrize("name", NAMES)
def test_resume_has_the_same_bits(wide_model, start_single, tmp_path, name):
    """Also from a checkpoint that was written before the first step, and into a worker that has
    made other steps."""
    needs(name)
    cfg = config_of(wide_model, name, actor__lr_schedule="linear", actor__warmup_steps=1)
    batch = make_batch(wide_model)
    worker = start_single(cfg, cls=PolicyWorker)
    found = []
    for folder in ("before", "between"):
        (tmp_path / folder).mkdir()
        worker.save_state(str(tmp_path / folder))
        worker.saved()
        worker.update(batch)
        worker.update(batch)
        found.append((whole(worker), whole_state(worker)))
    changed = {n: np.abs(found[1][0][n] - found[0][0][n]).max() for n in found[0][0]}
    assert min(changed.values()) > 0, changed
    for folder, (weights, state) in zip(("between", "before"), found[::-1], strict=True):
        if folder == "between":
            worker = start_single(cfg, cls=PolicyWorker)
        worker.load_state(str(tmp_path / folder))
        worker.update(batch)
        worker.update(batch)
        assert_equal(whole(worker), weights)
        assert_equal(whole_state(worker), state)


@pytest.mark.parametrize("name", NAMES)
def test_the_schedules_rate_and_skipped_steps(wide_model, start_single, name):
    needs(name)
    worker = start_single(config_of(wide_model, name, actor__warmup_steps=4), cls=PolicyWorker)
    batch = make_batch(wide_model)
    before = whole(worker)
    worker.role_config.max_grad_norm_skip = 1e-9
    worker.update(batch)
    assert_equal(whole(worker), before)
    assert not worker.optimizer.state, "a skipped step leaves no trace"
    worker.role_config.max_grad_norm_skip = None
    rates = [worker.update(batch)["actor/lr"] for _ in range(2)]
    assert rates == pytest.approx([0.5e-2, 0.75e-2])
    assert all(float(g["lr"]) == pytest.approx(rates[-1]) for g in worker.optimizer.param_groups)


def test_settings_of_the_config_count_after_a_resume(wide_model, start_single, tmp_path):
    worker = start_single(config_of(wide_model, "muon"), cls=PolicyWorker)
    worker.update(make_batch(wide_model))
    worker.save_state(str(tmp_path))
    worker.saved()
    changed = config_of(wide_model, "muon", actor__optimizer_kwargs={"momentum": 0.5})
    worker = start_single(changed, cls=PolicyWorker)
    worker.load_state(str(tmp_path))
    assert worker.optimizer.param_groups[0]["momentum"] == 0.5


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "muon"])
def test_the_estimate_of_its_memory(wide_model, start_single, name):
    needs(name)
    worker = start_single(config_of(wide_model, name), cls=PolicyWorker)
    optimizers.create_state(worker.optimizer)
    estimate = weight_checks._optimizer_bytes(name, worker.model)
    assert optimizers.state_bytes(worker.optimizer) == pytest.approx(estimate, rel=0.3)
    adamws = weight_checks._optimizer_bytes("adamw", worker.model)
    assert estimate / adamws == pytest.approx(
        {"adamw": 1, "adamw_8bit": 0.26, "muon": 0.55}[name], rel=0.1
    )


# Two ranks and one.


def run_rank(rank, world, path, names, folder, changes):
    """Two steps; what the weights and the state are, and a checkpoint of them; then the state of
    one rank's checkpoint."""
    torch.set_num_threads(1)
    for number, name in enumerate(names):
        cfg = config_of(path, name, **changes)
        worker = PolicyWorker(cfg, "actor", rank, world, "cpu", total_steps=10)
        join(worker, f"w{number}", folder)
        steps(worker, (1, 2))
        result = {
            "weights": whole(worker),
            "state": whole_state(worker),
            "bytes": optimizers.state_bytes(worker.optimizer),
        }
        checkpoint = Path(folder) / f"many{number}"
        checkpoint.mkdir(exist_ok=True)
        worker.save_state(str(checkpoint))
        worker.saved()
        steps(worker, (3,))
        worker.load_state(str(Path(folder) / f"one{number}"))
        result["loaded"] = (whole(worker), whole_state(worker))
        torch.save(result, f"{folder}/r{number}_{rank}.pt")
        end()
    # Here, because to start ranks takes seconds.
    worker = PolicyWorker(own_config(path, "NormOfItsRows"), "actor", rank, world, "cpu", 10)
    with pytest.raises(optimizer_trial.ConfigError, match="its 'norm' differs from rank to rank"):
        join(worker, "refused", folder)
    end()


def check_ranks(path, names, folder, start_single, world, **changes):
    wanted = []
    for number, name in enumerate(names):
        worker = start_single(config_of(path, name), cls=PolicyWorker)
        steps(worker, (1, 2))
        size = optimizers.state_bytes(worker.optimizer)
        wanted.append((whole(worker), whole_state(worker), size))
        (folder / f"one{number}").mkdir()
        worker.save_state(str(folder / f"one{number}"))
        worker.saved()
    end()
    run_ranks(run_rank, (world, path, names, str(folder), changes), world)
    shards = changes.get("actor__fsdp_size", world)
    for number, name in enumerate(names):
        weights, state, size = wanted[number]
        for rank in range(world):
            result = torch.load(folder / f"r{number}_{rank}.pt", weights_only=False)
            assert_equal(result["weights"], weights)
            assert_equal(result["state"], state)
            assert result["bytes"] < 1.2 * size / shards, "the state is sharded"
            assert_equal(result["loaded"][0], weights)
            assert_equal(result["loaded"][1], state)
        worker = start_single(config_of(path, name), cls=PolicyWorker)
        worker.load_state(str(folder / f"many{number}"))
        assert_equal(whole(worker), weights)
        assert_equal(whole_state(worker), state)


def test_two_ranks_take_the_steps_of_one(wide_model, start_single, tmp_path):
    """Bit for bit with the same gradients, and each reads the other's checkpoint."""
    has_torchao = packages.is_installed("torchao")
    names = [name for name in NAMES if has_torchao or name != "adamw_8bit"]
    check_ranks(wide_model, names, tmp_path, start_single, 2)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("changes", [{}, {"actor__fsdp_size": 2}], ids=["fsdp", "hsdp"])
def test_four_ranks_take_the_steps_of_one(wide_model, start_single, tmp_path, changes):
    """More ranks than the matrices of a round need, rows that do not divide, and two copies."""
    needs("adamw_8bit")
    check_ranks(wide_model, list(NAMES), tmp_path, start_single, 4, **changes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; this machine has none")
@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_takes_the_steps_of_a_cpu(wide_model, start_single, tmp_path, name, offload):
    needs(name)
    worker = start_single(config_of(wide_model, name), cls=PolicyWorker)
    before = whole(worker)
    steps(worker, (1, 2))
    wanted = whole(worker)
    end()
    cfg = config_of(wide_model, name, actor__optimizer_offload=offload)
    found = []
    for folder in (None, tmp_path):
        worker = PolicyWorker(cfg, "actor", 0, 1, "cuda", total_steps=10)
        worker.setup("127.0.0.1", free_port())
        if folder is None:
            steps(worker, (1, 2))
            worker.save_state(str(tmp_path))
            worker.saved()
        else:
            worker.load_state(str(folder))
        places = {local(t).device.type for t in optimizers.sharded_tensors(worker.optimizer)}
        assert places == {"cpu" if offload and folder is None else "cuda"}
        optimizers.move_state(worker.optimizer, "cuda")
        torch.cuda.synchronize()
        found.append((whole(worker), whole_state(worker)))
        end()
    assert_equal(found[1][0], found[0][0])
    assert_equal(found[1][1], found[0][1])
    for key, weights in wanted.items():
        apart = np.linalg.norm(found[0][0][key] - weights)
        assert apart < 0.05 * np.linalg.norm(weights - before[key]), key


def test_lora_with_muon(model_folders, start_single):
    keys = {"model__lora_rank": 2, "model__lora_alpha": 4, "actor__optimizer": "muon"}
    path = model_folders["tied"]
    worker = start_single(config(path, **keys, actor__lr=1e-2), cls=PolicyWorker)
    before = whole(worker)
    worker.update(make_batch(path))
    after = whole(worker)
    moved = {name for name in before if (before[name] != after[name]).any()}
    assert moved
    assert all("lora_" in name for name in moved)


# The users' own.


def own_config(path, name):
    cfg = config(path, actor__optimizer=f"{OWN}:{name}")
    cfg.placement.roles = {"rollout": "rollout", "actor": "actor"}
    return cfg


def refusal_of_trial(path, name, **kwargs):
    cfg = own_config(path, name)
    cfg.actor.optimizer_kwargs = kwargs
    with pytest.raises(optimizer_trial.ConfigError) as caught:
        optimizer_trial.check_user_optimizers(cfg)
    line = str(caught.value)
    assert line.startswith("actor.optimizer="), line
    assert len(line.splitlines()) == 1, line
    return line


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("Missing", "cannot be imported: AttributeError"),
        ("function", "no subclass of torch.optim.Optimizer"),
        ("CountsElsewhere", "steps differently after its state was saved"),
        ("KeepsAnObject", "its state cannot be saved"),
        ("HasNoRate", "have no lr"),
        ("NeedsAGradient", "cannot load its own state: ValueError: a gradient is zero"),
        ("DoesNothing", "changed no weight"),
        ("Breaks", "fails in a step: ZeroDivisionError: division by zero; change the class"),
    ],
)
def test_own_optimizers_that_are_refused_before_the_run(model_folders, name, part):
    assert part in refusal_of_trial(model_folders["tied"], name)


def test_settings_that_an_own_class_does_not_take(model_folders):
    line = refusal_of_trial(model_folders["tied"], "Lion", momentun=0.9)
    assert "refuses its settings: TypeError" in line
    assert "actor.optimizer_kwargs" in line


@pytest.mark.parametrize("name", ["torch.optim:SGD", "torch.optim:RAdam", f"{OWN}:Lion"])
def test_own_optimizers_that_are_accepted(model_folders, start_single, name):
    cfg = own_config(model_folders["tied"], "Lion")
    cfg.actor.optimizer = name
    cfg.actor.betas = [0.5, 0.6]
    random_state = torch.get_rng_state()
    optimizer_trial.check_user_optimizers(cfg)
    assert torch.equal(torch.get_rng_state(), random_state)
    worker = start_single(cfg, cls=PolicyWorker)
    defaults = worker.optimizer.defaults
    assert tuple(defaults.get("betas", (0.5, 0.6))) == (0.5, 0.6)
    assert defaults["weight_decay"] == 0.01


def test_plain_tensors_beside_shards_are_refused(model_folders, start_single):
    cfg = own_config(model_folders["tied"], "KeepsPlainTensors")
    optimizer_trial.check_user_optimizers(cfg)  # only shards show it
    with pytest.raises(optimizer_trial.ConfigError, match="keeps 'momentum' as a plain tensor"):
        start_single(cfg, cls=PolicyWorker)
