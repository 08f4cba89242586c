"""What must not leak: secrets into files and screens, and a run's sockets onto the network; and
whose code runs."""

from __future__ import annotations

import ast
import json
import socket
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import load_config
from one_step_off.config.schema import Config
from one_step_off.config.text import mask_secrets
from one_step_off.config.yaml_io import resolved_yaml
from one_step_off.distributed_util import bind_rendezvous_to_its_host, open_store
from one_step_off.main_ppo import main
from one_step_off.runtime.validation import validate
from tests.bad_input import base
from tests.unit.stand_ins import train_with

ROOT = Path(__file__).parents[3]
URL = "https://me:hunter2pass@scores.example/v1?token=s3cr3tvalue&size=4"
SHOWN = "https://***@scores.example/v1?token=***&size=4"
SECRETS = ("hunter2pass", "s3cr3tvalue", "hf_abcdefgh123")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (URL, SHOWN),
        ("mcp:http://u:p@h:1/mcp, calculator", "mcp:http://***@h:1/mcp, calculator"),
        ("http://h/x?api_key=abc#here", "http://h/x?api_key=***#here"),
        ("http://h/x?a=1&X-Amz-Signature=abc&b=2", "http://h/x?a=1&X-Amz-Signature=***&b=2"),
        ("the key is hf_abcdefgh123.", "the key is ***."),
        ("http://h:1/mcp?size=3 mail me@there", "http://h:1/mcp?size=3 mail me@there"),
        ("actor.lr=1 max_tokens=5 tokenizer: x", "actor.lr=1 max_tokens=5 tokenizer: x"),
    ],
)
def test_secrets_are_masked_and_nothing_else(text, shown, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh123")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "calculator")
    assert mask_secrets(text) == shown
    assert mask_secrets(shown) == shown


def test_no_file_and_no_screen_shows_a_secret(models, tmp_path, capsys, monkeypatch):
    """config.yaml, error.log, the dry run, TensorBoard's text and the line of an error, of one run
    that holds three."""
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh123")
    arguments = base(tmp_path, models())
    arguments = [
        *arguments,
        f"trainer.output_dir={tmp_path}/new",
        f"reward_model.url={URL}",
        "agent.tools=",
    ]
    secret = "data.instruction=${oc.env:HF_TOKEN}"
    assert main([*arguments, secret, "--dry-run"]) == 0

    def fail(*_: object) -> None:
        raise RuntimeError(f"401 from {URL} with hf_abcdefgh123")

    train_with(monkeypatch, fail)
    assert main([*arguments, secret]) == 1
    assert (
        main([*arguments, f"reward_model.path={models()}", "placement.roles.reward_model=actor"])
        == 2
    )
    out, err = capsys.readouterr()
    assert SHOWN in out
    assert SHOWN in err
    written = {path: path.read_bytes() for path in (tmp_path / "new").rglob("*") if path.is_file()}
    assert {"config.yaml", "error.log"} <= {path.name for path in written}
    assert SHOWN in (tmp_path / "new" / "config.yaml").read_text()
    for secret in SECRETS:
        assert secret not in out + err
        assert not [path for path, content in written.items() if secret.encode() in content]


def test_a_masked_config_asks_for_its_secret(tmp_path):
    good = [
        "model.path=tiny:qwen2",
        "data.train_files=generator:word_problems",
        "trainer.total_steps=1",
        "placement.device=cpu",
    ]
    cfg = load_config([*good, f"reward_model.url={URL}"])
    validate(cfg)
    (tmp_path / "x.yaml").write_text(resolved_yaml(cfg))
    again = load_config([f"config={tmp_path}/x.yaml"])
    with pytest.raises(ConfigError, match="reward_model.url=https://.*with its secret"):
        validate(again)
    whole = load_config([f"config={tmp_path}/x.yaml", f"reward_model.url={URL}"])
    validate(whole)
    assert whole == cfg, "nothing but the secret is missing"


def test_wandb_is_given_no_secret(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    from one_step_off.monitoring.loggers import Wandb

    given = {}

    class Run:
        url = "here"

        def define_metric(self, *_: object, **__: object) -> None:
            """Nothing."""

    def init(**how: object) -> Run:
        given.update(how)
        return Run()

    monkeypatch.setattr(wandb, "init", init)
    monkeypatch.setattr(wandb, "setup", lambda **_: None)
    cfg = Config()
    cfg.trainer.output_dir = str(tmp_path)
    cfg.reward_model.url = URL
    cfg.actor.lr = 1e-6
    Wandb(cfg, False)
    assert given["config"]["reward_model"]["url"] == SHOWN
    assert given["config"]["actor"]["lr"] == 1e-6
    assert not any(secret in json.dumps(given["config"]) for secret in SECRETS)


def listening() -> set[str]:
    return {
        c.laddr.ip
        for c in psutil.Process().net_connections("inet")
        if c.status == psutil.CONN_LISTEN
    }


def test_stores_listen_at_their_own_address_alone():
    """A store of ours, and the one that init_process_group makes, as vLLM's workers do."""
    before = listening()
    bind_rendezvous_to_its_host()
    store = open_store("127.0.0.1", timeout_s=60.0)
    client = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    client.set("a", "b")
    assert store.get("a") == b"b"
    with socket.create_server(("127.0.0.1", 0)) as s:
        port = s.getsockname()[1]
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=1, rank=0)
    try:
        dist.barrier()
        assert listening() - before <= {"127.0.0.1"}
        assert "127.0.0.1" in listening()
    finally:
        dist.destroy_process_group()


# --- code of models ---

LOADING_METHODS = ("from_pretrained", "from_config", "load_dataset")
# Keyword mappings that hold trust_remote_code, and variables that hold its value.
OPTIONS_WITH_TRUST = ("**options",)
VALUES_OF_TRUST = ("cfg.model.trust_remote_code", "trust", "False")


def loading_calls() -> list[tuple[Path, ast.Call, str]]:
    """The calls that could run code of a repository, with their source."""
    found = []
    for folder in ("one_step_off", "agent_loop"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            source = path.read_text()
            for node in ast.walk(ast.parse(source)):
                is_loading = isinstance(node, ast.Call) and (
                    getattr(node.func, "attr", "") in LOADING_METHODS
                )
                if is_loading:
                    found.append((path, node, ast.get_source_segment(source, node)))
    return found


def passes_trust(call: ast.Call, source: str) -> bool:
    """Whether a call hands model.trust_remote_code on."""
    for keyword in call.keywords:
        if keyword.arg == "trust_remote_code" and ast.unparse(keyword.value) in VALUES_OF_TRUST:
            return True
    return any(options in source for options in OPTIONS_WITH_TRUST)


def test_code_of_models_runs_only_where_it_is_asked_for():
    """Every call that could run a repository's code gets model.trust_remote_code, which is false by
    default. Data sets have no such switch at all."""
    assert Config().model.trust_remote_code is False
    methods = set()
    for path, call, source in loading_calls():
        method = getattr(call.func, "attr", "")
        methods.add(method)
        loads_no_code = path.name == "tiny_qwen.py" or "GenerationConfig" in source
        if method == "load_dataset":
            assert "trust" not in source, f"{path}: {source}"
        elif not loads_no_code:  # our own models, and files of mere numbers
            assert passes_trust(call, source), f"{path}: {source}"
    assert methods == set(LOADING_METHODS)


def test_no_pickle_is_loaded_with_any_class():
    for path in (ROOT / "one_step_off").rglob("*.py"):
        assert "weights_only=False" not in path.read_text(), path
