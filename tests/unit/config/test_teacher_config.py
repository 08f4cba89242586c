"""The role teacher in a config: who scores what, how pools are shared, and faults in one line."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from one_step_off.config.errors import ConfigError
from one_step_off.config.placement import memory_share, processes_per_node, processes_per_slot
from one_step_off.config.teachers import (
    config_of_teacher,
    teacher_of_row,
    teacher_of_sources,
    teacher_paths,
)
from one_step_off.data.samples import Prompt
from one_step_off.data.teacher_rows import check_teacher_sources, teacher_lookup
from one_step_off.runtime.processes import config_of_groups
from one_step_off.runtime.validation import validate
from tests.unit.config.config_helpers import fault, good

TEACHER = ("placement.roles.teacher=actor", "teacher.path=tiny:teacher")
ENGINE = (
    "placement.pools={rollout: [1], actor: [1], teacher: [2]}",
    "placement.roles={rollout: rollout, actor: actor, teacher: teacher}",
    "teacher.path=tiny:teacher",
    "teacher.backend=vllm",
)
ALONE = ("algorithm.adv_estimator=none",)
SOURCES = "teacher.by_source={math: org/math, code: tiny:teacher, more: org/math}"

BAD = [
    (["teacher.path=tiny:teacher"], ["teacher.path=tiny:teacher", "placement.roles.teacher"]),
    (["placement.roles.teacher=actor"], ["teacher.path", "set both or neither"]),
    (
        ["algorithm.adv_estimator=none"],
        ["algorithm.adv_estimator=none", "needs a teacher", "teacher.path"],
    ),
    ([*TEACHER, "teacher.path=tiny:teachers"], ["teacher.path=tiny:teachers", "unknown tiny"]),
    ([*TEACHER, "teacher.path=tiny:qwen2-0"], ["teacher.path=tiny:qwen2-0", "unknown tiny"]),
    ([*TEACHER, "teacher.path=no_such_folder"], ["teacher.path=no_such_folder", "no such dir"]),
    (
        [*TEACHER, "teacher.by_source={math: nowhere}"],
        ["teacher.by_source.math=nowhere", "no such directory"],
    ),
    (
        [*TEACHER, "teacher.by_source={default: org/math}"],
        ["teacher.by_source.default=org/math", "teacher.path is the teacher of all other rows"],
    ),
    ([*TEACHER, "teacher.by_source=org/math"], ["teacher.by_source=org/math", "mapping"]),
    ([*TEACHER, "teacher.weight=0"], ["teacher.weight=0", "above 0"]),
    ([*TEACHER, "teacher.top_k=-1"], ["teacher.top_k=-1", "at least 0"]),
    ([*TEACHER, "teacher.top_k=5000"], ["teacher.top_k=5000", "at most 1000"]),
    (
        [*TEACHER, "teacher.top_k=4", "teacher.backend=megatron"],
        ["teacher.top_k=4", "teacher.backend=megatron", "teacher.backend=fsdp"],
    ),
    (
        [*TEACHER, "teacher.top_k=4", "actor.backend=megatron", "teacher.backend=fsdp"],
        ["teacher.top_k=4", "actor.backend=megatron", "actor.backend=fsdp"],
    ),
    ([*TEACHER, "teacher.backend=hf"], ["teacher.backend=hf", "fsdp, megatron, vllm"]),
    (
        [*TEACHER, "teacher.backend=vllm"],
        ["teacher.backend=vllm", "shares the pool with actor", "a pool of its own"],
    ),
    (
        [*ENGINE, SOURCES],
        ["teacher.backend=vllm", "several teachers", "teacher.backend=fsdp"],
    ),
    (
        [*ENGINE, "rollout.temperature=0.7"],
        ["rollout.temperature=0.7", "temperature 1 only", "teacher.backend=fsdp"],
    ),
    (
        [*ENGINE, "teacher.pipeline_parallel_size=2"],
        ["teacher.pipeline_parallel_size=2", "remove it"],
    ),
    (
        [*ENGINE, "teacher.tensor_parallel_size=4"],
        ["teacher.tensor_parallel_size=4", "does not divide placement.pools.teacher"],
    ),
    (
        [*ENGINE, "teacher.engine_kwargs={model: x}"],
        ["teacher.engine_kwargs.model=x", "use teacher.path"],
    ),
    (
        [*ENGINE, "teacher.engine_kwargs={max_logprobs: 3}"],
        ["teacher.engine_kwargs.max_logprobs=3", "the program sets it"],
    ),
    (
        [*ENGINE, "teacher.engine_kwargs={max_model_len: 1536}"],
        ["teacher.engine_kwargs.max_model_len=1536", "use at least 1537"],
    ),
    (
        [*TEACHER, *ALONE, "algorithm.kl_in_reward=true"],
        ["algorithm.kl_in_reward=true", "adv_estimator=none", "do nothing", "set it to false"],
    ),
    (
        [*TEACHER, *ALONE, "algorithm.max_gen_batches=2"],
        ["algorithm.max_gen_batches=2", "adv_estimator=none", "only measured", "set it to 1"],
    ),
    (
        [*TEACHER, *ALONE, "reward.overlong_buffer=4"],
        ["reward.overlong_buffer=4", "adv_estimator=none", "do nothing", "set it to 0"],
    ),
    (
        [*TEACHER, "teacher.engine_kwargs={max_num_seqs: 3}"],
        ["teacher.engine_kwargs", "has no engine", "teacher.backend=vllm"],
    ),
]


@pytest.mark.parametrize(("argv", "words"), BAD, ids=lambda x: str(x[-1]) if x else "")
def test_a_fault_is_one_line(argv: list[str], words: list[str]) -> None:
    line = fault(*argv)
    for word in words:
        assert word in line, line


@pytest.mark.parametrize(
    "argv",
    [
        TEACHER,
        (*TEACHER, "algorithm.adv_estimator=none", "rollout.n=1"),
        (*TEACHER, "teacher.top_k=8", "teacher.weight=0.1"),
        (*TEACHER, SOURCES),
        (*TEACHER, "model.path=tiny:qwen2-1"),
        ENGINE,
        (*ENGINE, "teacher.tensor_parallel_size=2", "teacher.top_k=20"),
        (*ENGINE, "teacher.engine_kwargs={max_model_len: 1537}"),
        (*TEACHER, "algorithm.max_gen_batches=2", "reward.overlong_buffer=4"),
        (
            "placement.pools={all: [1]}",
            "placement.roles={rollout: all, actor: all, teacher: all}",
            "pipeline.staleness=0",
            "teacher.path=tiny:teacher",
        ),
    ],
)
def test_valid_settings(argv: tuple[str, ...]) -> None:
    validate(good(*argv), num_gpus=0)


def test_sources_with_one_model_have_one_teacher() -> None:
    cfg = good(*TEACHER, SOURCES)
    assert teacher_paths(cfg) == {"default": "tiny:teacher", "math": "org/math"}
    teachers = teacher_of_sources(cfg)
    assert teachers == {"math": "math", "code": "default", "more": "math"}
    assert teacher_of_row(teachers, "more", "code") == "math", "the source of the config wins"
    assert teacher_of_row(teachers, "", "math") == "math", "else the row's own"
    assert teacher_of_row(teachers, "other", "") == "default"
    assert list(config_of_groups(cfg, "teacher")) == ["teacher", "teacher.math"]
    assert config_of_groups(cfg, "ref") == {"ref": cfg}


def test_each_teacher_sees_its_model_and_the_same_shares() -> None:
    """Two teachers and the actor share a slot, whichever of them counts."""
    pools = "placement.pools={rollout: [0.4], actor: [0.6]}"
    cfg = good(*TEACHER, SOURCES, pools)
    for name, path in teacher_paths(cfg).items():
        own = config_of_teacher(cfg, name)
        assert own.teacher.path == path
        assert processes_per_slot(own, "actor") == 3
        assert memory_share(own, "teacher") == pytest.approx(0.2)
    assert processes_per_slot(cfg, "rollout") == 1
    assert cfg.teacher.path == "tiny:teacher", "the run's config stays as it is"


def test_an_engine_of_two_gpus_is_one_process() -> None:
    cfg = good(*ENGINE, "teacher.tensor_parallel_size=2")
    assert processes_per_node(cfg, "teacher") == [1]
    assert processes_per_node(good(*ENGINE), "teacher") == [2]


def data_with(*sources: tuple[str, str]) -> SimpleNamespace:
    """Run data of one prompt per (source, data_source)."""
    prompts = [
        Prompt((0, row), None, "", "", data_source=data_source, source=source)
        for row, (source, data_source) in enumerate(sources)
    ]
    by_id = {prompt.id: prompt for prompt in prompts}
    return SimpleNamespace(stream=SimpleNamespace(prompts=prompts), find=by_id.get)


def test_a_source_without_rows_is_refused() -> None:
    cfg = good(*TEACHER, "teacher.by_source={maths: org/math}")
    with pytest.raises(ConfigError, match="by_source.maths=org/math: no row .*did you mean math?"):
        check_teacher_sources(cfg, data_with(("", "math"), ("", "code")))
    check_teacher_sources(cfg, data_with(("maths", "")))


def test_the_teacher_of_a_sample_is_that_of_its_row() -> None:
    cfg = good(*TEACHER, SOURCES)
    name_of = teacher_lookup(cfg, data_with(("math", ""), ("", "code"), ("", "")))
    names = [name_of(SimpleNamespace(prompt_id=(0, row))) for row in range(4)]
    assert names == ["math", "default", "default", "default"]


def test_home_and_hub_paths(tmp_path: Path) -> None:
    validate(good(*TEACHER, "teacher.path=org/teacher"), num_gpus=0)
