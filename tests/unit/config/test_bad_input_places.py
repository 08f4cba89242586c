"""Bad surroundings: folders, disks, memory, a Ray that is none, packages, checkpoints, and
functions of the user's own.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from one_step_off.checkpoint.manifest import file_facts
from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.main_ppo import main
from one_step_off.runtime import launch
from one_step_off.runtime.failure_report import report_failure
from tests.bad_input import base, refused, without_privileges, write
from tests.unit.stand_ins import train_with

# --- folders and disks
# -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["", "/deeper/run"])
def test_a_folder_that_may_not_be_written(inner, models, tmp_path, capsys):
    arguments = base(tmp_path, models())
    (tmp_path / "closed").mkdir(mode=0o500)
    with without_privileges():
        said = ["TMP/closed", "Permission denied", "name another"]
        refused(
            [*arguments, f"trainer.output_dir={tmp_path}/closed{inner}"], said, tmp_path, capsys
        )


@pytest.mark.parametrize(
    ("folder", "parts"),
    [
        ("TMP/file", ["TMP/file is not a folder"]),
        ("TMP/file/run", ["TMP/file is not a folder"]),
        ("TMP/link", ["TMP/link is not a folder"]),
        ("/dev/null", ["/dev/null is not a folder"]),
        ("' '", ["trainer.output_dir", "not set", "name a folder"]),
    ],
)
def test_folders_that_are_none(folder, parts, models, tmp_path, capsys):
    arguments = base(tmp_path, models())
    write(tmp_path, {"file": "x"})
    os.symlink(tmp_path / "nowhere", tmp_path / "link")
    refused(
        [*arguments, f"trainer.output_dir={folder}".replace("TMP", str(tmp_path))],
        parts,
        tmp_path,
        capsys,
    )


@contextlib.contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A file system in memory of its own, where this machine lets root have one."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "none", str(folder)],
        capture_output=True,
        timeout=10,
    )
    if done.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True, timeout=10)


def test_a_file_system_that_is_read_only(models, tmp_path, capsys):
    arguments = base(tmp_path, models())
    (tmp_path / "disk").mkdir()
    with mounted(tmp_path / "disk", "ro,size=64k"):
        parts = [
            "trainer.output_dir=TMP/disk/run",
            "TMP/disk is not a folder that can be written to",
            "name another",
        ]
        refused([*arguments, f"trainer.output_dir={tmp_path}/disk/run"], parts, tmp_path, capsys)


def test_a_disk_that_is_full(models, tmp_path, capsys):
    arguments = base(tmp_path, models())
    (tmp_path / "disk").mkdir()
    with mounted(tmp_path / "disk", "size=16k"):
        write(tmp_path, {"disk/filler": bytes(8192)})
        with contextlib.suppress(OSError):
            write(tmp_path, {"disk/filler2": bytes(65536)})
        parts = ["TMP/disk/run", "No space left on device", "name another"]
        refused([*arguments, f"trainer.output_dir={tmp_path}/disk/run"], parts, tmp_path, capsys)


def test_a_limit_to_the_size_of_files(models, tmp_path, capsys):
    arguments = base(tmp_path, models())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        parts = ["TMP/new", "File too large", "name another"]
        refused([*arguments, f"trainer.output_dir={tmp_path}/new"], parts, tmp_path, capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_disk_that_fills_up_in_the_run_ends_it_in_one_line(models, tmp_path, capsys, monkeypatch):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    train_with(monkeypatch, full)
    arguments = [*base(tmp_path, models()), f"trainer.output_dir={tmp_path}/new"]
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err == f"error: {tmp_path}/new: No space left on device; name another folder\n"
    monkeypatch.setattr(Path, "write_text", full)
    said = report_failure(Config(), RuntimeError("what happened"))
    assert said.startswith("error: the run ended by RuntimeError: what happened\n")
    assert "error.log" not in said, "a file that is not there is not named"
    assert "No space left on device" in said, "a file that is not there is not named"
    assert said.endswith("RuntimeError: what happened\n"), "the traceback itself is there instead"


OURS = [
    (lambda run: PermissionError(errno.EACCES, "Permission denied", f"{run}/metrics.jsonl"),
     "run/metrics.jsonl: Permission"),
    (lambda run: PermissionError(errno.EPERM, "Operation not permitted", f"{run}/samples/x"),
     "run/samples/x: Operation"),
    (lambda run: OSError(errno.EROFS, "Read-only file system", f"{run}/x/../y"),
     "run/x/../y: Read-only"),
    (lambda run: OSError(errno.EDQUOT, "Disk quota exceeded"), "run: Disk quota"),
]  # fmt: skip
OTHERS = [
    lambda run: PermissionError(errno.EACCES, "Permission denied"),  # of a socket
    lambda run: PermissionError(errno.EPERM, "Operation not permitted"),
    lambda run: PermissionError(errno.EACCES, "Permission denied", "/somewhere/else"),
    lambda run: PermissionError(errno.EACCES, "Permission denied", f"{run}_of_mine/x"),
    lambda run: PermissionError(errno.EACCES, "Permission denied", 7),
    lambda run: OSError(errno.ENOSPC, "No space left on device", "/dev/shm/x"),
    lambda run: OSError(errno.ECONNREFUSED, "refused"),
]


@pytest.mark.parametrize("case", [*OURS, *((make, None) for make in OTHERS)])
def test_only_a_fault_of_the_runs_own_folder_asks_for_another(
    case, models, tmp_path, capsys, monkeypatch
):
    """What else a run may not do, as open a user's socket, is an error of the run, whose traceback
    is kept.
    """
    (make, said), run = case, tmp_path / "own_run"

    def fail(*_: object) -> None:
        raise make(run)

    train_with(monkeypatch, fail)
    arguments = [*base(tmp_path, models()), f"trainer.output_dir={run}"]
    capsys.readouterr()  # the model may just have been written
    code = main(arguments)
    err = capsys.readouterr().err
    log = run / "error.log"
    if said:
        assert code == 2, err
        assert err.startswith(f"error: {tmp_path}/own_{said}"), err
        assert not log.exists(), err
        assert err.endswith("; name another folder\n")
        assert err.count("\n") == 1
    else:
        assert code == 1, err
        assert "another folder" not in err, err
        assert "Traceback" in log.read_text(), err


def test_a_cache_that_may_not_be_written(models, tmp_path, capsys, monkeypatch):
    arguments = base(tmp_path, "tiny:qwen2")
    (tmp_path / "closed").mkdir(mode=0o500)
    for name in ("HF_HOME", "XDG_CACHE_HOME", "ONE_STEP_OFF_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / "closed"))
    with without_privileges():
        refused(
            arguments,
            ["TMP/closed", "Permission denied", "set ONE_STEP_OFF_CACHE"],
            tmp_path,
            capsys,
        )


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_models_that_may_not_be_read(name, models, tmp_path, capsys):
    import shutil

    shutil.copytree(models(), tmp_path / "model")
    (tmp_path / "model" / name).chmod(0)
    arguments = base(tmp_path, f"{tmp_path}/model")
    with without_privileges():
        refused(arguments, ["TMP/model", "give"], tmp_path, capsys)


def test_a_config_that_may_not_be_read(models, tmp_path, capsys):
    write(tmp_path, {"x.yaml": "model: {path: x}\n"})
    (tmp_path / "x.yaml").chmod(0)
    with without_privileges():
        refused(
            [f"config={tmp_path}/x.yaml"],
            ["config=TMP/x.yaml", "Permission denied", "check"],
            tmp_path,
            capsys,
        )


# --- the machine
# -------------------------------------------------------------------------------------------------


def test_a_model_larger_than_the_memory(models, tmp_path, capsys, monkeypatch):
    whole = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: whole._replace(total=200 << 20))
    parts = [
        "model.path=",
        "take 0.267 GiB (actor 0.0132, rollout 0.253)",
        "this machine has 0.195 GiB",
        "kv_cache_mb",
    ]
    refused(base(tmp_path, models()), parts, tmp_path, capsys)


def test_a_cache_larger_than_the_memory(models, tmp_path, capsys):
    size = 2 * psutil.virtual_memory().total >> 20
    arguments = [*base(tmp_path, models()), f"rollout.kv_cache_mb={size}"]
    refused(
        arguments, ["model.path=", "KV cache take", "GiB", "rollout.kv_cache_mb"], tmp_path, capsys
    )


def test_more_replicas_than_the_memory_holds(models, tmp_path, capsys):
    arguments = [
        *base(tmp_path, models()),
        "placement.pools.rollout=[1024]",
        "rollout.kv_cache_mb=4096",
    ]
    refused(arguments, ["rollout 4.1e+03", "placement.pools"], tmp_path, capsys)


@pytest.mark.parametrize(
    "said",
    ["HTTP/1.1 400 Bad Request\r\n\r\n", "", "SSH-2.0-OpenSSH_9.6\r\n"],
    ids=["http", "none", "ssh"],
)
def test_a_port_where_something_else_answers(said, models, tmp_path, capsys, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def answer() -> None:
            connection, _ = server.accept()
            connection.sendall(said.encode())
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        monkeypatch.setenv("RAY_ADDRESS", address)
        parts = [f"RAY_ADDRESS={address}", "no Ray cluster answers there", "ray start --head"]
        refused(base(tmp_path, models()), parts, tmp_path, capsys)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1:1",
        "127.0.0.1:99999",
        "[::1]:1",
        "no-such-host.invalid:6379",
    ],
)
def test_addresses_where_nobody_answers(address, models, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", address)
    refused(
        base(tmp_path, models()),
        [f"RAY_ADDRESS={address}", "no Ray cluster", "unset"],
        tmp_path,
        capsys,
    )


@pytest.mark.parametrize("error", [
    ConnectionError("Could not find any running Ray instance"), OSError("AF_UNIX path length"),
    PermissionError(13, "Permission denied", "/x/ray"), RuntimeError("Version mismatch"),
])  # fmt: skip
def test_a_ray_that_does_not_start(error, tmp_path, monkeypatch):
    import ray

    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(
        ConfigError, match="Ray does not start: .*; check RAY_ADDRESS, and that TMPDIR"
    ):
        launch.start_ray(Config())


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_packages_that_are_missing(package, models, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    arguments = [*base(tmp_path, models()), f"logging.{package}=true"]
    refused(
        arguments,
        [f"logging.{package}=true", "missing", f"pip install {package}"],
        tmp_path,
        capsys,
    )


MACHINE = [
    ("no GPUs", ["placement.device=cuda"],
     ["2 GPUs", "this machine has 0", "placement.device=cpu"]),
    ("unknown device", ["placement.device=tpu"],
     ["placement.device=tpu", "one of auto, cuda, cpu"]),
    ("nodes without a cluster", ["placement.pools.actor=[1, 1]"],
     ["2 nodes", "this machine is one", "RAY_ADDRESS"]),
    ("too many processes", ["placement.pools.actor=[5000]"],
     ["placement.pools.actor=[5000]", "1024"]),
    ("flash attention without GPUs", ["model.attn_implementation=flash_attention_2"],
     ["needs GPUs", "use auto"]),
    ("offloading without GPUs", ["actor.param_offload=true"],
     ["actor.param_offload=true", "on CPU"]),
    ("hub model while offline", ["model.path=some/model"],
     ["model.path=some/model", "HF_HUB_OFFLINE"]),
    ("hub model of no name", ["model.path=some/model/of/mine"],
     ["some/model/of/mine", "not a hub id", "check"]),
    ("a file for a model", [f"model.path={__file__}"],
     ["model.path=", "no such directory", "check"]),
    ("heads that cannot be divided",
     ["rollout.tensor_parallel_size=3", "placement.pools.rollout=[3]"], ["4 attention heads"]),
    ("too long sequences", ["data.max_response_length=99999999"],
     ["data.max_prompt_length + data.max_response", "lower"]),
    ("engine's field that is none", ["rollout.engine_kwargs.max_nums=1"],
     ["max_nums=1", "no such field"]),
    ("experts of a dense model", ["rollout.replay_routing=true"],
     ["rollout.replay_routing=true", "model.path=", "no experts", "set it to false"]),
    ("experts of uncached prefixes",
     ["rollout.replay_routing=true", "rollout.engine_kwargs.enable_prefix_caching=false"],
     ["enable_prefix_caching=false", "set rollout.replay_routing=false"]),
    ("experts of another scheduler",
     ["rollout.replay_routing=true", "rollout.engine_kwargs.scheduler_cls=my.Scheduler"],
     ["scheduler_cls=my.Scheduler", "set rollout.replay_routing=false"]),
    ("experts by vLLM's own field", ["rollout.engine_kwargs.enable_return_routed_experts=true"],
     ["enable_return_routed_experts=true", "use rollout.replay_routing"]),
    ("a package for draft tokens", ["rollout.speculation=suffix"],
     ["rollout.speculation=suffix", "pip install --no-deps arctic-inference", "use ngram"]),
    ("critic of no model",
     ["critic.path=no/model", "placement.roles.critic=actor", "algorithm.adv_estimator=gae"],
     ["critic.path=no/model", "config cannot be loaded"]),
    ("policy as reward model", ["reward_model.path=MODEL", "placement.roles.reward_model=actor"],
     ["lacks 1 weights", "score.weight", "give"]),
    ("layers without adapters", ["model.lora_rank=4", "model.lora_target_modules=q proj"],
     ["lora_target_modules=q proj"]),
    ("a server without its scheme", ["reward_model.url=127.0.0.1:80"],
     ["reward_model.url=127.0.0.1:80", "must be http"]),
    ("tools that nobody serves", ["agent.loop=tool", "agent.tools=mcp:http://127.0.0.1:1/mcp"],
     ["agent.tools=mcp:http://127.0.0.1:1/mcp", "start it"]),
    ("unknown tool", ["agent.tools=calculater"],
     ["agent.tools=calculater", "did you mean calculator?"]),
    ("unknown loop", ["agent.loop=tools"], ["agent.loop=tools", "did you mean tool?"]),
    ("setting of a loop that it lacks",
     ["agent.loop=tool", "agent.tools=calculator", "agent.loop_kwargs={tool: {fromat: x}}"],
     ["fromat"]),
    ("arguments for a built-in", ["reward.kwargs.a=1"], ["reward.kwargs", "remove them"]),
    ("W&B project of no name", ["logging.wandb=true", "logging.wandb_project="],
     ["logging.wandb_project", "name a project"]),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "parts"), [m[1:] for m in MACHINE], ids=[m[0] for m in MACHINE])
def test_the_machine_and_what_it_reaches(argv, parts, models, tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    arguments = [*base(tmp_path, models()), *(a.replace("MODEL", models()) for a in argv)]
    refused(arguments, parts, tmp_path, capsys)


# --- functions of the user's own
# ---------------------------------------------------------------------------------

OWN_REWARD = "reward.function=bad_input_own:f"
FUNCTIONS = [
    ("syntax", "def f(:\n", OWN_REWARD, ["SyntaxError", "fix the module"]),
    ("raises", "1 / 0\n", OWN_REWARD, ["ZeroDivisionError", "fix the module"]),
    ("exits", "import sys; sys.exit(3)\n", OWN_REWARD, ["SystemExit", "fix the module"]),
    ("missing import", "import no_such_module\n", OWN_REWARD, ["no_such_module", "fix the module"]),
    ("missing file", "open('/nowhere/x')\n", OWN_REWARD, ["FileNotFoundError", "fix the module"]),
    ("no such name", "def g(): pass\n", OWN_REWARD, ["has no attribute 'f'", "check the name"]),
    ("no function", "f = 3\n", OWN_REWARD, ["a int, not callable", "name a function"]),
    ("coroutine", "async def f(**_): pass\n", OWN_REWARD, ["asynchronous", "plain function"]),
    ("too few arguments", "def f(x): pass\n", OWN_REWARD,
     ["called as f(prompt=", "**kwargs takes"]),
    ("an estimator that raises", "1 / 0\n", "algorithm.adv_estimator=bad_input_own:f",
     ["ZeroDivisionError", "fix the module"]),
    ("an estimator that is none", "f = 3\n", "algorithm.adv_estimator=bad_input_own:f",
     ["not callable", "name a function"]),
    ("a loss that is none", "f = 3\n", "algorithm.policy_loss=bad_input_own:f",
     ["not callable", "name a function"]),
    ("a loss that exits", "raise SystemExit\n", "algorithm.policy_loss=bad_input_own:f",
     ["SystemExit", "fix the module"]),
    ("a loop that is none", "f = 3\n", "agent.loop=bad_input_own:f", ["agent.loop"]),
    ("a loop that raises", "1 / 0\n", "agent.loop=bad_input_own:f",
     ["agent.loop", "ZeroDivisionError"]),
    ("a tool without types", "def f(x):\n    '''Doc.'''\n",
     "agent.tools=bad_input_own:f agent.loop=tool", ["agent.tools", "docstring"]),
    ("not UTF-8", b"x = '\xff'\n", OWN_REWARD, ["SyntaxError", "fix the module"]),
    ("zero bytes", b"x = 1\0\n", OWN_REWARD, ["fix the module"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "argv", "parts"), [f[1:] for f in FUNCTIONS], ids=[f[0] for f in FUNCTIONS]
)
def test_functions_of_the_users_own(source, argv, parts, models, tmp_path, capsys, monkeypatch):
    write(tmp_path, {"bad_input_own.py": source})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    try:
        refused(
            [*base(tmp_path, models()), *argv.split()], ["bad_input_own", *parts], tmp_path, capsys
        )
    finally:
        sys.modules.pop("bad_input_own", None)


# --- checkpoints
# -------------------------------------------------------------------------------------------------

FIXED = {
    "pipeline.staleness": 1,
    "weight_sync.in_flight": "wait",
    "rollout.n": 2,
    "data.train_batch_size": 4,
    "trainer.seed": 0,
    "model.dtype": "float32",
}
FIXED |= {"agent.loop": "single_turn", "actor.backend": "fsdp"}
FIXED |= {"model.lora_rank": 0, "model.lora_alpha": 32, "model.lora_target_modules": "all-linear"}


def state(**changed: object) -> dict[str, str]:
    """`state.json` of a checkpoint made with other values of the fixed keys."""
    return {
        "state.json": json.dumps(
            {"step": 4, "fixed": FIXED | {k.replace("__", "."): v for k, v in changed.items()}}
        )
    }


GOOD_ONE = "name an intact one, or start from step 0"
CHECKPOINTS = [
    ("nothing there", None, ["no checkpoint there", "state.json is missing", "use auto"]),
    ("an empty folder", {}, ["no checkpoint there", "state.json is missing", "use auto"]),
    ("an unfinished one", {"samples.jsonl": ""},
     ["no checkpoint there", "state.json is missing", "use auto"]),
    ("no manifest", {"state.json": "{}", "x": ""},
     ["manifest.json", "FileNotFoundError", GOOD_ONE]),
    ("a folder for the manifest", {"state.json": "{}", "manifest.json/": ""},
     ["manifest.json", "IsADirectoryError", GOOD_ONE]),
    ("a manifest of no bytes", {"state.json": "{}", "manifest.json": ""},
     ["manifest.json", "JSONDecodeError", GOOD_ONE]),
    ("a manifest cut off", {"state.json": "{}", "manifest.json": '{"format": 2, "bytes": {'},
     ["manifest.json", GOOD_ONE]),
    ("a manifest that is no text", {"state.json": "{}", "manifest.json": b"\xff\xfe\0"},
     ["manifest.json", GOOD_ONE]),
    ("another format", {"state.json": "{}", "manifest.json": '{"format": 1}'},
     ["it has format 1", "reads 2", GOOD_ONE]),
    ("other samples per prompt", state(rollout__n=8),
     ["rollout.n=2", "was written with 8", "resume with it"]),
    ("another seed", state(trainer__seed=5),
     ["trainer.seed=0", "was written with 5", "trainer.resume=never"]),
    ("another back end", state(actor__backend="megatron"),
     ["actor.backend=fsdp", "was written with megatron"]),
    ("another model's rank", state(model__lora_rank=8),
     ["model.lora_rank=0", "was written with 8", "(a new folder)"]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("files", "parts"), [c[1:] for c in CHECKPOINTS], ids=[c[0] for c in CHECKPOINTS]
)
def test_checkpoints_that_are_none(files, parts, models, tmp_path, capsys):
    folder = tmp_path / "step_000004"
    if files is not None:
        folder.mkdir()
        write(folder, files)
    if files and files.keys() == {"state.json"}:
        write(
            folder,
            {"manifest.json": json.dumps({"format": 2, "shape": {}} | file_facts(folder))},
        )
    refused(
        [*base(tmp_path, models()), f"trainer.resume={folder}"],
        ["TMP/step_000004", *parts],
        tmp_path,
        capsys,
    )
