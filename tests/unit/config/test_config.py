"""The config: what is accepted, how it is written out, and where its processes run."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from one_step_off.config import hardware, packages
from one_step_off.config.errors import ConfigError, UnknownKeys
from one_step_off.config.help import help_text
from one_step_off.config.loading import KEYS, load_config
from one_step_off.config.placement import placement_text, process_cores
from one_step_off.config.sections import data, reward, rollout
from one_step_off.config.sections.data import split_files, train_sources
from one_step_off.config.yaml_io import resolved_yaml
from one_step_off.data import word_problems
from one_step_off.runtime.validation import validate, validate_supervised
from tests.unit.config.config_helpers import ROOT, SHARED, fault, good, load_text, write

# A warning would be a second line on the console.
pytestmark = pytest.mark.filterwarnings("error")


def test_values_are_read_as_meant(tmp_path: Path) -> None:
    text = (
        "actor: {lr: 1e-6, eps: 1E-8, grad_clip: 1}\n"
        "rollout: {seed_samples: on}\n"
        "trainer: {total_steps: null, output_dir: 2026-01-01}\n"
    )
    cfg = load_config(
        [f"config={write(tmp_path / 'x.yaml', text)}", "actor.weight_decay=1e-2", "rollout.n=4.0"]
    )
    assert (cfg.actor.lr, cfg.actor.eps, cfg.actor.weight_decay) == (1e-6, 1e-8, 0.01)
    assert isinstance(cfg.actor.grad_clip, float)
    assert cfg.rollout.n == 4
    assert cfg.rollout.seed_samples == "on"
    assert cfg.trainer.total_steps is None
    assert cfg.trainer.output_dir == "2026-01-01"
    assert (
        good("data.instruction=Think: end with #### number").data.instruction
        == "Think: end with #### number"
    )
    assert good("data.val_files=null").data.val_files == ""
    assert good("data.instruction='  a'").data.instruction == "  a"
    assert good("rollout.seed_samples=off").rollout.seed_samples == "off"
    assert good("trainer.output_dir=2026-01-01").trainer.output_dir == "2026-01-01"


# What is typed, and what it means where a whole number, a number and anything is wanted.
# None: it is refused.
SCALARS = [
    ("010", 10, 10.0, 10),
    ("08", 8, 8.0, 8),
    ("0o10", 8, 8.0, 8),
    ("0x10", 16, 16.0, 16),
    ("0b11", 3, 3.0, 3),
    ("1_000", 1000, 1000.0, 1000),
    ("+5", 5, 5.0, 5),
    ("+010", 10, 10.0, 10),
    ("1e5", 100000, 1e5, 1e5),
    ("012.5", None, 12.5, 12.5),
    ("1.5e-3", None, 0.0015, 0.0015),
    (".5", None, 0.5, 0.5),
    ("1:30", None, None, "1:30"),
    ("190:20:30.5", None, None, "190:20:30.5"),
    ("1__0", None, None, "1__0"),
    ("1,000", None, None, "1,000"),
    ("2024-01-02", None, None, "2024-01-02"),
    ("0x", None, None, "0x"),
    ("\u0661", None, None, "\u0661"),
    ("=", None, None, "="),
    ("y", None, None, "y"),
    ("no", None, None, None),
    ("on", None, None, None),
    (".inf", None, None, float("inf")),
]


@pytest.mark.parametrize(("typed", "whole", "number", "free"), SCALARS)
def test_a_scalar_means_what_a_person_typed(
    tmp_path: Path, typed: str, whole: int | None, number: float | None, free: Any
) -> None:
    """In a file and as an argument, and the written config holds the same."""
    path = tmp_path / "x.yaml"
    meanings = {"trainer.seed": whole, "actor.eps": number, "rollout.engine_kwargs.x": free}
    for dotted, value in meanings.items():
        section, name, *entry = dotted.split(".")
        written = f"\n    x: {typed}" if entry else f" {typed}"
        write(path, f"{section}:\n  {name}:{written}\n")
        for argv in ([f"config={path}"], [f"{dotted}={typed}"]):
            if value is None:
                with pytest.raises(ConfigError, match="must be|write (true|false), or quote"):
                    load_config(argv)
                continue
            cfg = load_config(argv)
            loaded = getattr(getattr(cfg, section), name)
            loaded = loaded["x"] if entry else loaded
            assert (loaded, type(loaded)) == (value, type(value))
            assert load_text(resolved_yaml(cfg)) == cfg


TYPED_TEXTS = ["010", "1_000", "1:30", "no", "on", "1e5", "1.10", "0x10", "y", "2024-01-02", "+5"]


@pytest.mark.parametrize("typed", TYPED_TEXTS)
def test_where_text_is_wanted_it_stays_as_typed(tmp_path: Path, typed: str) -> None:
    text = (
        f"data:\n  instruction: {typed}\n  val_sets: {{{typed}: {typed}}}\n"
        f"  train_files: [{{files: {typed}, name: {typed}}}]\n"
        f"placement: {{roles: {{actor: {typed}}}, pools: {{{typed}: [01]}}}}\n"
        f"rollout: {{engine_kwargs: {{{typed}: {{{typed}: '{typed}'}}}}}}\n"
    )
    of_file = load_config([f"config={write(tmp_path / 'x.yaml', text)}"])
    of_arguments = load_config(
        [
            f"data.instruction={typed}",
            f"data.val_sets={{{typed}: {typed}}}",
            f"data.train_files=[{{files: {typed}, name: {typed}}}]",
            f"placement.roles.actor={typed}",
            f"placement.pools={{{typed}: [01]}}",
            f"rollout.engine_kwargs={{{typed}: {{{typed}: '{typed}'}}}}",
        ]
    )
    for cfg in (of_file, of_arguments):
        assert cfg.data.instruction == typed
        assert cfg.data.val_sets == {typed: typed}
        assert cfg.data.train_files == [{"files": typed, "name": typed}]
        assert cfg.placement.roles["actor"] == typed
        assert cfg.placement.pools == {typed: [1]}
        outer = cfg.rollout.engine_kwargs
        assert list(outer) == [typed]
        assert list(outer[typed].values()) == [typed]
        assert load_text(resolved_yaml(cfg)) == cfg


def test_truth_values_where_they_are_wanted(tmp_path: Path) -> None:
    path = write(tmp_path / "x.yaml", "trainer: {val_only: yes}\nrollout: {seed_samples: no}\n")
    cfg = load_config([f"config={path}", "algorithm.kl_in_reward=on"])
    assert cfg.trainer.val_only is True
    assert cfg.algorithm.kl_in_reward is True
    assert cfg.rollout.seed_samples == "off"
    assert good("rollout.seed_samples=true").rollout.seed_samples == "on"
    with pytest.raises(ConfigError, match=r"reward.kwargs.a.b\[1\]=no: may be false or a text"):
        load_config(["reward.kwargs={a: {b: [1, no]}}"])
    with pytest.raises(ConfigError, match=r"reward.kwargs.a\\nb=no: may be false or a text"):
        load_config(['reward.kwargs={"a\\nb": no}'])
    assert load_config(["reward.kwargs={a: 'no', b: false}"]).reward.kwargs == {
        "a": "no",
        "b": False,
    }


def test_merged_mappings_are_read_alike(tmp_path: Path) -> None:
    text = (
        "trainer: &common {output_dir: 010, seed: 010}\n"
        "data:\n  val_sets: &sets {no: 08}\n"
        "teacher:\n  by_source: {<<: *sets, on: 09}\n"
    )
    cfg = load_config([f"config={write(tmp_path / 'x.yaml', text)}"])
    assert (cfg.trainer.output_dir, cfg.trainer.seed) == ("010", 10)
    assert cfg.teacher.by_source == {"no": "08", "on": "09"}
    write(tmp_path / "y.yaml", "actor: &a {optimizer: no, lr: 1}\ncritic: {<<: *a, lr: 010}\n")
    cfg = load_config([f"config={tmp_path / 'y.yaml'}"])
    assert (cfg.critic.optimizer, cfg.critic.lr) == ("no", 10.0)
    text = (
        "trainer: {<<: [{output_dir: 010}, {seed: 010}]}\n"
        "data: {val_sets: {<<: [{no: 08}, {off: 1:30}]}}\n"
    )
    cfg = load_config([f"config={write(tmp_path / 'z.yaml', text)}"])
    assert (cfg.trainer.output_dir, cfg.trainer.seed) == ("010", 10)
    assert cfg.data.val_sets == {"no": "08", "off": "1:30"}


SINGLE_PATHS = [key.dotted for key in KEYS.values() if "path" in key.metadata]


@pytest.mark.parametrize("dotted", SINGLE_PATHS)
def test_a_single_path_stays_as_typed(tmp_path: Path, dotted: str) -> None:
    section, name = dotted.split(".")
    text = "/data/lr=1e-6, seed=1 , x"
    path = write(tmp_path / "x.yaml", f'{section}: {{{name}: "{text}"}}\n')
    for argv in ([f"config={path}"], [f"{dotted}={text}"]):
        cfg = load_config(argv)
        assert getattr(getattr(cfg, section), name) == text
        assert load_text(resolved_yaml(cfg)) == cfg


def test_single_paths_and_files_are_told_apart() -> None:
    assert {"trainer.output_dir", "trainer.resume", "model.path"} < set(SINGLE_PATHS)
    files = {key.dotted for key in KEYS.values() if "files" in key.metadata}
    expected = {"data.train_files", "data.val_files", "data.val_sets"}
    assert files == expected | {"sft.train_files", "sft.val_files"}


def test_a_data_file_may_have_a_comma_in_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a, b.jsonl", "c.jsonl"):
        write(tmp_path / name, "")
    forms = {
        "a, b.jsonl": ["a, b.jsonl"],
        " a, b.jsonl": ["a, b.jsonl"],
        "~/a, b.jsonl": [f"{tmp_path}/a, b.jsonl"],
        r"a\, b.jsonl, c.jsonl": ["a, b.jsonl", "c.jsonl"],
        "['a, b.jsonl', c.jsonl]": ["a, b.jsonl", "c.jsonl"],
        "c.jsonl, d.jsonl": ["c.jsonl", "d.jsonl"],
    }
    for text, files in forms.items():
        for key in ("data.train_files", "data.val_files", "sft.train_files", "data.val_sets.x"):
            cfg = load_config([f"{key}={text}"])
            section, name, *_ = key.split(".")
            value = getattr(getattr(cfg, section), name)
            value = value["x"] if name == "val_sets" else value
            assert split_files(value) == files
            assert load_text(resolved_yaml(cfg)) == cfg
        source = load_config([f'data.train_files=[{{files: "{text}"}}]'.replace("\\", "\\\\")])
        assert split_files(train_sources(source.data.train_files)[0].files) == files
    content = "data: {val_files: ['a, b.jsonl', c.jsonl]}\n"
    cfg = load_config([f"config={write(tmp_path / 'x.yaml', content)}"])
    assert split_files(cfg.data.val_files) == ["a, b.jsonl", "c.jsonl"]


def test_the_advice_for_a_dollar_brace_works_as_it_is_printed(tmp_path: Path) -> None:
    """The line names the spelling; here it is followed to the letter."""
    argument = "data.instruction=Put ${a} in ${b}"
    with pytest.raises(ConfigError, match=r"or \\\$\{ \(within single quotes of the shell\)"):
        load_config([argument])
    escaped = argument.replace("${", r"\${")
    printed = subprocess.run(f"printf %s '{escaped}'", shell=True, capture_output=True, text=True)
    assert load_config([printed.stdout]).data.instruction == "Put ${a} in ${b}"

    path = tmp_path / "x.yaml"
    write(path, "data:\n  instruction: Put ${a}\n")
    with pytest.raises(ConfigError, match=r"x.yaml:2: .*\(within double quotes \\\\\$\{\)"):
        load_config([f"config={path}"])
    for spelling in (r"Put \${a}", r"'Put \${a}'", r'"Put \\${a}"'):
        write(path, f"data:\n  instruction: {spelling}\n")
        cfg = load_config([f"config={path}"])
        assert cfg.data.instruction == "Put ${a}"
        assert load_text(resolved_yaml(cfg)) == cfg


def test_arguments_go_over_the_file_in_any_order(tmp_path: Path) -> None:
    path = write(tmp_path / "x.yaml", "actor: {lr: 1.0, eps: 2.0}\n")
    cfg = load_config(["actor.lr=3", f"config={path}"])
    assert (cfg.actor.lr, cfg.actor.eps) == (3.0, 2.0)


def test_mappings_replace_and_dots_add(tmp_path: Path) -> None:
    path = write(
        tmp_path / "x.yaml",
        "placement: {pools: {gen: [2], train: [1]}, roles: {rollout: gen, actor: train}}\n",
    )
    cfg = load_config(
        [
            f"config={path}",
            "placement.pools.gen=[4]",
            "rollout.engine_kwargs.foo=bar",
            "rollout.engine_kwargs.a.b=1",
        ]
    )
    assert cfg.placement.pools == {"gen": [4], "train": [1]}
    assert cfg.placement.roles == {"rollout": "gen", "actor": "train"}
    assert cfg.rollout.engine_kwargs == {"foo": "bar", "a": {"b": 1}}
    assert load_config(["placement.pools={x: [1]}"]).placement.pools == {"x": [1]}
    assert load_config([]).placement.pools == {"rollout": [1], "actor": [1]}, (
        "the defaults must not be shared"
    )


def test_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHERE", "/data")
    monkeypatch.setenv("RATE", "1e-5")
    assert good("actor.lr=${oc.env:RATE}").actor.lr == 1e-5
    assert good("trainer.output_dir=${oc.env:WHERE}/run").trainer.output_dir == "/data/run"


@pytest.mark.parametrize("path", sorted((ROOT / "config").glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_configs_are_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = load_config([f"config={path}"])
    if any(len(shape) > 1 for shape in cfg.placement.pools.values()):
        monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # several nodes need a cluster
    monkeypatch.setattr(packages, "is_installed", lambda package: True)
    check = validate_supervised if path.name.startswith("sft_") else validate
    check(cfg, num_gpus=8)
    assert load_text(resolved_yaml(cfg)) == cfg


def test_valid_combinations() -> None:
    validate(good("algorithm.kl_coef=0.1", "placement.roles.ref=actor"), 0)
    validate(good("algorithm.old_log_probs=recompute", "algorithm.rollout_correction=tis"), 0)
    validate(good("rollout.sampling_kwargs={stop: [x], stop_token_ids: [1], ignore_eos: true}"), 0)
    validate(good("rollout.sampling_kwargs={stop: x, skip_special_tokens: false}"), 0)
    validate(
        good("rollout.engine_kwargs={tokenizer: x, max_num_seqs: 8}", "pipeline.staleness=0"), 0
    )
    validate(good("rollout.engine_kwargs={hf_overrides: null, enable_lora: false}"), 0)
    fp8 = "rollout.quantization=fp8_per_channel"
    validate(good(fp8, "rollout.kv_cache_dtype=fp8", "model.dtype=bfloat16"), 0)
    validate(good("rollout.kv_cache_dtype=fp8", "weight_sync.mode=delta"), 0)
    validate(good("rollout.quantization=mxfp8", "model.dtype=bfloat16", "placement.device=cuda"), 2)
    split = "rollout.engine_kwargs={enable_chunked_prefill: true, max_num_batched_tokens: 512}"
    validate(good(split, "placement.device=cuda"), 2)
    own_size = "rollout.engine_kwargs.kv_cache_memory_bytes=1000000000"
    validate(good(own_size, "placement.device=cuda"), 2)
    with pytest.raises(ConfigError, match="whole number above 0, in bytes"):
        validate(good(own_size.replace("1000000000", "1G"), "placement.device=cuda"), 2)
    validate(good("algorithm.kl_estimator=k1"), 0)
    validate(
        good(
            "placement.pools={rollout: [4], actor: [4]}",
            "actor.fsdp_size=2",
            "rollout.tensor_parallel_size=2",
        ),
        0,
    )
    validate(good("actor.param_offload=true", "placement.device=auto"), 2)


def test_gpus_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    gpu = "placement.device=cuda"
    eight = "placement.pools={rollout: [2], actor: [6]}"
    line = fault(gpu, eight, num_gpus=4)
    assert "{rollout: [2], actor: [6]}" in line
    assert "8 GPUs" in line
    assert "has 4" in line
    validate(good(gpu, eight), 8)
    nodes = "placement.pools={rollout: [2], actor: [8, 8]}"
    for device in (gpu, "placement.device=cpu"):
        line = fault(device, nodes, num_gpus=18)
        assert "placement.pools.actor=[8, 8]: 2 nodes" in line
        assert "RAY_ADDRESS" in line
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    validate(good(gpu, eight), 0)
    validate(good(gpu, nodes), 0)
    validate(good(nodes), 0)


def test_cpu_runs_count_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> int:
        raise AssertionError("counted")

    monkeypatch.setattr(hardware, "count_gpus", refuse)
    validate(good())


_YAML_VALUES = (
    "null true on ~ ??? ${a} ${actor.lr} ${model} {} [] {a:1} [1] {a:[1]} {1:2} !!set{a} "
    "tiny:qwen2 &a[*a] /"
).split()
_values = st.one_of(
    st.text(max_size=12),
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(_YAML_VALUES),
    st.recursive(
        st.integers(-3, 3) | st.sampled_from(["a", "1e-6", "x: y"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(st.sampled_from(["a", "rollout"]), inner, max_size=2)
        ),
        max_leaves=4,
    ).map(str),
)
_names = (
    st.sampled_from(sorted(KEYS))
    | st.text(max_size=8)
    | st.tuples(st.sampled_from(sorted(KEYS)), st.text(max_size=3)).map(".".join)
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(_names, _values), max_size=3))
def test_any_override_gives_a_config_or_one_line(pairs: list[tuple[str, str]]) -> None:
    argv = [f"{name}={value}" for name, value in pairs if name != "config"]
    try:
        cfg = good(*argv)
        assert load_text(resolved_yaml(cfg)) == cfg
        validate(cfg, 0)
        placement_text(cfg, [0, 1])
    except ConfigError as e:
        assert str(e)
        expected = e.lines if isinstance(e, UnknownKeys) else [str(e)]  # a line for each key
        assert str(e).splitlines() == expected


@settings(max_examples=100, deadline=None)
@given(
    st.text(st.sampled_from("model:path{}[]&*!|>-? \n'\"#,1.\t%@x"), max_size=60)
    | st.text(max_size=40)
)
def test_any_file_gives_a_config_or_one_line(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(text.encode("utf-8", "replace"))
    try:
        load_config([f"config={path}"])
    except ConfigError as e:
        assert str(e)
        expected = e.lines if isinstance(e, UnknownKeys) else [str(e)]
        assert str(e).splitlines() == expected


def test_every_key_has_help() -> None:
    text = help_text()
    for key in KEYS.values():
        assert key.metadata["help"].strip()
        assert f"  {key.dotted}  (" in text


def test_the_checks_know_the_same_names_as_their_owners() -> None:
    rewards = pytest.importorskip("one_step_off.rewards.verifiers")
    assert set(reward.BUILT_IN_REWARDS) == set(rewards.REWARD_FUNCTIONS)
    assert set(data.GENERATORS) == set(word_problems.GENERATORS)


def test_what_goes_to_vllm_has_vllms_names() -> None:
    vllm = importlib.util.find_spec("vllm")
    if vllm is None:
        pytest.skip("needs vLLM")
    fields: dict[str, set[str]] = {}
    # Read, not imported: that takes many seconds.
    for file in ("engine/arg_utils.py", "sampling_params.py"):
        for node in ast.parse(Path(vllm.submodule_search_locations[0], file).read_text()).body:
            if isinstance(node, ast.ClassDef):
                fields[node.name] = {f.target.id for f in node.body if isinstance(f, ast.AnnAssign)}
    sampling_fields = fields["SamplingParams"]
    engine_fields = fields["EngineArgs"]
    assert set(rollout.ALLOWED_SAMPLING_FIELDS) <= sampling_fields
    assert set(rollout.KEYS_OF_VLLM_FIELDS) <= sampling_fields | engine_fields
    assert set(rollout.ENGINE_FIELDS_SET_BY_US) <= engine_fields
    assert set(rollout.UNSAFE_ENGINE_FIELDS) <= engine_fields
    assert set(rollout.UNSAFE_ENGINE_FIELDS_ON_CPU) <= engine_fields


def test_config_and_data_packages_import_neither_torch_nor_ray() -> None:
    modules = "config.loading data.samples runtime.validation".split()
    imports = "; ".join(f"import one_step_off.{module}" for module in modules)
    code = (
        f"import sys; {imports}; print([m for m in ('torch', 'ray', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "[]\n", done.stderr


def test_resolved_yaml_keeps_awkward_texts() -> None:
    for text in (
        "a: b # c",
        "${x}",
        "\\${x}",
        "two\nlines",
        "on",
        "1e-6",
        " x ",
        "null",
        "é\u2028\x85b",
        "[1",
    ):
        cfg = dataclasses.replace(good())
        cfg.data.instruction = text
        assert load_text(resolved_yaml(cfg)).data.instruction == text


def test_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    cfg = good("placement.pools={rollout: [4], actor: [2]}", "rollout.tensor_parallel_size=2")
    assert process_cores(cfg, "cpu", [0, 1, 2, 3]) == {"rollout": [[0], [1]], "actor": [[2], [3]]}
    assert placement_text(cfg, [0, 1, 2, 3]).splitlines() == [
        "rollout [4] on cpu: rollout x 2 (TP 2); cores 0 1",
        "actor [2] on cpu: actor x 2; cores 2 3",
    ]
    assert process_cores(good("placement.pin_cores=false"), "cpu") == {
        "rollout": [[]],
        "actor": [[]],
    }
    with monkeypatch.context() as cluster:  # whose machines may have fewer cores than this one
        cluster.setenv("RAY_ADDRESS", "10.0.0.1:6379")
        assert process_cores(good(), "cpu", [0, 1]) == {"rollout": [[]], "actor": [[]]}
    colocated = good(*SHARED, "pipeline.staleness=0")
    assert process_cores(colocated, "cpu", [0, 1, 2, 3]) == {"all": [[0, 1], [2, 3]]}, (
        "all cores, in both phases"
    )
    assert placement_text(colocated, [0, 1]) == "all [2] on cpu: rollout x 2, actor x 2; cores 0 1"
    gpu = good("placement.device=cuda", "placement.pools={rollout: [4, 4], actor: [8, 8]}")
    text = placement_text(gpu, [0, 1])
    assert "rollout [4, 4] on cuda: rollout x 8" in text
    assert "cores" not in text
