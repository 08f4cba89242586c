"""The layouts of the Megatron back end: what is accepted, what is refused, and what other roles
inherit of them.
"""

from __future__ import annotations

import pytest

from one_step_off.config import packages
from one_step_off.config.placement import data_parallel_size, placement_text
from one_step_off.config.roles import role_settings
from one_step_off.runtime.validation import validate
from tests.unit.config.config_helpers import fault, good

MEGATRON = [
    (
        ["actor.context_parallel_size=3"],
        ["context_parallel_size=3", "share 3 ranks", "placement.pools"],
    ),
    (
        ["actor.tensor_parallel_size=2", "actor.pipeline_parallel_size=4"],
        [
            "actor.tensor_parallel_size=2, actor.pipeline_parallel_size=4: would share 8 ranks",
            "its 4",
        ],
    ),
    (["actor.expert_parallel_size=3"], ["expert_parallel_size=3", "4 ranks of each stage"]),
    (
        ["actor.sequence_parallel_size=2"],
        ["sequence_parallel_size=2", "only the fsdp back end", "actor.context_parallel_size"],
    ),
    (["actor.fsdp_size=2"], ["actor.fsdp_size=2", "only the fsdp back end"]),
    (
        ["model.attn_implementation=sdpa"],
        ["attn_implementation=sdpa", "actor.backend=megatron", "chooses its own", "use auto"],
    ),
    (
        ["actor.packing=on", "actor.context_parallel_size=2"],
        ["actor.packing=on", "context parallelism", "padded", "use auto or off"],
    ),
    (["actor.optimizer_offload=true"], ["actor.optimizer_offload=true", "set it to false"]),
    (
        ["actor.router_bias_update_rate=0.001"],
        ["actor.router_bias_update_rate=0.001", "only the fsdp back end", "set it to 0"],
    ),
]


@pytest.mark.parametrize(("argv", "words"), MEGATRON)
def test_layouts_of_megatron(argv, words, monkeypatch):
    monkeypatch.setattr(packages, "is_installed", lambda package: True)
    line = fault("placement.pools.actor=[4]", "actor.backend=megatron", *argv)
    for word in words:
        assert word in line
    cfg = good(
        "placement.pools.actor=[4]", "actor.backend=megatron", "actor.tensor_parallel_size=2"
    )
    assert "actor x 4 (TP 2); cores" in placement_text(cfg, [0, 1])
    validate(cfg, 0)
    assert data_parallel_size(cfg, "actor") == 2
    monkeypatch.setattr(packages, "is_installed", lambda package: False)
    assert "MEGATRON=1 shell/setup.sh" in fault("actor.backend=megatron")
    monkeypatch.setattr(packages, "is_installed", lambda package: package == "megatron.core")
    good("actor.backend=megatron", "placement.device=cpu")
    line = fault("actor.backend=megatron", "placement.device=cuda")
    assert "transformer-engine" in line
    assert "EXTRA=gpu MEGATRON=1 shell/setup.sh" in line


def test_a_role_of_its_own_inherits_no_layout(monkeypatch):
    monkeypatch.setattr(packages, "is_installed", lambda package: True)
    stages = "actor.pipeline_parallel_size=2", "actor.virtual_pipeline_parallel_size=2"
    argv = (
        "placement.pools.actor=[4]",
        "actor.backend=megatron",
        "placement.roles.ref=actor",
        "algorithm.kl_coef=0.1",
    )
    for own in ("ref.backend=fsdp", "ref.pipeline_parallel_size=1", "ref.backend=null"):
        cfg = good(*argv, *stages, own)
        validate(cfg, 0)
        result = role_settings(cfg, "ref")
        follows = own == "ref.backend=null"
        assert (result.pipeline_parallel_size, result.virtual_pipeline_parallel_size) == (
            (2, 2) if follows else (1, None)
        )
    other = good(*argv[:1], *argv[2:], "ref.backend=megatron", "actor.micro_batch_tokens=77")
    assert role_settings(other, "ref").micro_batch_tokens == 77
