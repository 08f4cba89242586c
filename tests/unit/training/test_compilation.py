"""torch.compile of a trainer's functions: where it is used, and what happens where it fails."""

from __future__ import annotations

import functools
import logging
from dataclasses import replace

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from one_step_off.training import compilation
from one_step_off.training.compilation import Compiler, is_wanted
from one_step_off.training.fsdp.fsdp_workers import PolicyWorker
from tests.unit.training.fsdp_helpers import config, make_batch
from tests.unit.training.test_shared_prefix_roles import ALWAYS


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.parametrize(
    ("setting", "device", "expected"),
    [
        (None, "cuda", True),
        (None, "cpu", False),
        (True, "cpu", True),
        (False, "cuda", False),
    ],
)
def test_by_default_on_gpus_only(setting, device, expected):
    assert is_wanted(setting, torch.device(device)) is expected


def broken_compiler(graph, example_inputs):
    raise OSError("no C compiler found\nlong explanation")


def same_graph(graph, example_inputs):
    return graph.forward


BROKEN = {
    "forward": broken_compiler,
    "backward": aot_autograd(fw_compiler=same_graph, bw_compiler=broken_compiler),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_what_cannot_be_compiled_runs_as_it_is_and_is_reported_once(broken, caplog):
    compiler = Compiler("two functions", backend=BROKEN[broken])
    double = compiler.compiled(lambda x: x * 2)
    triple = compiler.compiled(lambda x: x * 3, otherwise=lambda x: x * 3.0)
    x = torch.ones(3, requires_grad=True)
    with caplog.at_level(logging.WARNING, logger=compilation.__name__):
        for _ in range(2):
            (double(x) + triple(x)).sum().backward()
    assert x.grad.tolist() == [10.0] * 3
    (record,) = caplog.records
    message = record.getMessage()
    assert message.startswith("two functions: cannot be compiled and will run slower")
    assert "no C compiler" in message
    assert "\n" not in message


def test_beyond_the_limit_of_graphs_the_other_function_runs(caplog):
    """torch would run the function itself then: for the log-probs all rows at once, not in
    blocks."""
    are_compiled: list[bool] = []
    others: list[int] = []

    def scaled(x, factor):
        are_compiled.append(torch.compiler.is_compiling())
        return x * factor

    def otherwise(x, factor):
        others.append(factor)
        return x * factor

    product = Compiler("a product", backend="eager", dynamic=False).compiled(scaled, otherwise)
    with (
        torch._dynamo.config.patch(recompile_limit=2),
        caplog.at_level(logging.WARNING, logger=compilation.__name__),
    ):
        for factor in (2, 3, 4, 5):
            assert product(torch.ones(1), factor).item() == factor
    assert others == [4, 5]
    assert all(are_compiled)
    (record,) = [r for r in caplog.records if r.name == compilation.__name__]
    assert "a product: will run slower from now on" in record.getMessage()
    assert "recompile_limit=2" in record.getMessage()


def test_errors_of_the_function_itself_pass():
    def refuse(x):
        torch._dynamo.graph_break()
        raise ValueError(f"{len(x)} are too many")

    with pytest.raises(ValueError, match="3 are too many"):
        Compiler("a function", backend="eager").compiled(refuse)(torch.ones(3))


@pytest.mark.slow
@pytest.mark.parametrize("packing", ["on", "off", "shared"])
def test_layers_are_compiled_once_for_batches_of_all_shapes(
    model_folders, start_single, monkeypatch, packing
):
    """By a compiler that generates no code, so that this takes less time. "shared": rows with and
    without shared prefixes."""
    path = model_folders["tied"]
    monkeypatch.setattr(
        compilation.torch, "compile", functools.partial(torch.compile, backend="aot_eager")
    )
    losses = {}
    graphs = []
    for compiles in (True, False):
        cfg = config(
            path,
            actor__torch_compile=compiles,
            actor__packing="on" if packing == "shared" else packing,
            actor__micro_batch_tokens=60,
            algorithm__entropy_coef=0.01,
        )
        worker = start_single(cfg, cls=PolicyWorker)
        if packing == "shared":
            worker.batch_share.sharing = replace(ALWAYS, least_gain=0.1)
        graphs.append(counters["stats"]["unique_graphs"])
        losses[compiles] = []
        for step in range(4):
            batch = make_batch(path, seed=step, version=3 + step)
            worker.version = 3 + step
            worker.log_prob(batch)
            losses[compiles].append(worker.update(batch)["actor/loss"])
            graphs.append(counters["stats"]["unique_graphs"])
    assert losses[True] == pytest.approx(losses[False], abs=1e-5)
    started, first, *later = graphs[:5]
    assert 0 < started <= first <= 30
    # torch compiles a padded micro-batch of one row apart, with and without gradients.
    assert later[-1] <= first + 2 * (packing == "off")
    assert graphs[5:] == later[-1:] * 5, "torch_compile=false has compiled"
    if packing != "off":
        assert started == first, "the first step has compiled"
