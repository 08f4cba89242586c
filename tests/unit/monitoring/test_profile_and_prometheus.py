"""What looks into a run from outside: torch's profile of one step, and the gauges that Prometheus
asks for."""

from __future__ import annotations

import asyncio
import gzip
import importlib.util
import io
import json
import re
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
import torch.distributed as dist
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from one_step_off.config.errors import ConfigError
from one_step_off.config.loading import load_config
from one_step_off.config.schema import Config
from one_step_off.data.samples import Batch, Sample
from one_step_off.main_ppo import main
from one_step_off.monitoring import loggers
from one_step_off.monitoring.loggers import LogEntry
from one_step_off.monitoring.tracker import Tracker
from one_step_off.training.trainer_group import WorkerGroup
from tests.dashboard import DASHBOARD, dashboard_metrics
from tests.unit.forked_ranks import run_ranks
from tests.unit.training.fsdp_helpers import (
    config,
    free_port,
    make_batch,
    start,
)


def test_a_worker_writes_torchs_profile_of_its_update_and_learns_the_same(
    model_folders, start_single, tmp_path
):
    path = model_folders["tied"]
    batch = make_batch(path)
    plain = start_single(config(path)).update(batch)
    worker = start_single(config(path))
    profiled = worker.update(batch, True, str(tmp_path / "run" / "profile"))
    assert worker.version == 1
    for name in ("actor/loss", "actor/grad_norm"):
        assert profiled[name] == pytest.approx(plain[name], rel=1e-6)
    (profile,) = (tmp_path / "run" / "profile").iterdir()
    assert profile.name == "actor_rank_0.json.gz"
    events = json.loads(gzip.decompress(profile.read_bytes()))["traceEvents"]
    names = {e["name"] for e in events}
    assert {"aten::mm", "aten::embedding"} <= names
    assert any("backward" in name.lower() for name in names)


def profiled_megatron_rank(rank: int, path: str, port: int, folder: str) -> None:
    """One of two ranks of Megatron-core's actor."""
    from one_step_off.training.megatron.megatron_workers import WORKERS

    torch.set_num_threads(1)
    cfg = config(path, actor__backend="megatron")
    worker = start(cfg, rank=rank, world=2, port=port, cls=WORKERS["actor"])
    worker.update(make_batch(path), True, folder)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)
def test_each_rank_of_megatron_writes_its_own_profile(model_folders, tmp_path):
    args = (model_folders["untied"], free_port(), str(tmp_path))
    run_ranks(profiled_megatron_rank, args, 2)
    assert {path.name for path in tmp_path.iterdir()} == {
        f"actor_rank_{rank}.json.gz" for rank in (0, 1)
    }
    for path in tmp_path.iterdir():
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        assert "aten::mm" in {e["name"] for e in events}


@pytest.mark.parametrize(("step", "wanted"), [(3, True), (4, False)])
def test_only_the_step_that_is_asked_for_is_profiled(tmp_path, monkeypatch, step, wanted):
    asked = []

    class Method:
        async def remote(self, batch, learn, profile):
            asked.append(profile)
            return {"actor/loss": 0.0}

    monkeypatch.setattr(ray, "put", lambda x: x)
    monkeypatch.chdir(tmp_path)
    cfg = Config()
    cfg.trainer.profile_step = 3
    cfg.trainer.output_dir = "run"
    group = WorkerGroup("actor", [SimpleNamespace(update=Method()) for _ in range(2)], cfg)

    asyncio.run(group.update(Batch(step, [], (0, 0))))
    assert asked == [str(tmp_path / "run" / "profile") if wanted else ""] * 2


def test_profile_on_the_command_line(capsys):
    common = ["config=config/gsm8k_tiny_cpu.yaml", "--dry-run"]
    assert main([*common, "--profile", "7"]) == 0
    assert "profile_step: 7" in capsys.readouterr().out
    for argv, shown in (([*common, "--profile"], "missing"), (["--profile", "x", *common], "x")):
        assert main(argv) == 2
        assert f"trainer.profile_step={shown}: must be a whole number" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="profile_step=-1: must be at least 0"):
        load_config(["trainer.profile_step=-1"])


def gauges(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    return {name: float(value) for name, value in re.findall(r"^(\w+) (\S+)$", text, re.M)}


def test_the_gauges_are_the_newest_figures_and_the_dashboard_asks_for_nothing_else(tmp_path):
    """tests/a_row.json is the row of a step of config/gsm8k_tiny_cpu.yaml."""
    cfg = Config()
    port = free_port()
    cfg.trainer.output_dir = str(tmp_path)
    cfg.logging.prometheus_port = port
    cfg.logging.tensorboard = cfg.logging.sample_dump = False
    lines: list[str] = []
    tracker = Tracker(str(tmp_path), 9, io.StringIO())
    tracker.loggers = loggers.open_loggers(
        cfg, 0, lambda _: None, lines.append, loggers.start_remote_loggers(cfg, False)
    )
    z = np.zeros(2)
    tracker.evaluation(
        4, [Sample((-1, 0), i, z, z, z, z > -1, z.astype(int), reward=i) for i in (0, 1)], 0.5
    )
    row = json.loads((Path(__file__).parents[2] / "a_row.json").read_text())
    tracker.loggers.step(row, Batch(row["step"], [], (0, 0)))
    gauge_values = {}
    deadline = time.monotonic() + 10
    while (
        "one_step_off_step" not in gauge_values and time.monotonic() < deadline
    ):  # a thread of the loggers' own does it
        gauge_values = gauges(port)
    assert gauge_values["one_step_off_step"] == row["step"]
    assert gauge_values["one_step_off_reward_mean"] == row["reward/mean"]
    assert gauge_values["one_step_off_val_pass_2"] == 1.0
    assert gauge_values["one_step_off_restarts_trainer"] == 0
    assert "one_step_off_sync_changed_share" not in gauge_values, "null: there was no such figure"
    tracker.loggers.step(row | {"step": 99, "reward/mean": 0.75}, Batch(99, [], (0, 0)))
    tracker.close()  # waits for the queue, and then gives the port back
    assert not lines
    with pytest.raises(urllib.error.URLError):
        gauges(port)
    asked = dashboard_metrics()
    assert len(asked) > 15
    assert asked <= set(gauge_values), sorted(asked - set(gauge_values))


def test_the_newest_figures_replace_the_older():
    server = loggers.Prometheus(port := free_port())
    step_3 = {"reward/mean": 0.25, "ratio/mean": 1.0}
    evaluation = {"val/version": 4.0, "val/pass@4": 0.5}
    server.write(LogEntry(step_3, 3, is_evaluation=False, samples=[]))
    server.write(LogEntry(evaluation, 4, is_evaluation=True, samples=[]))
    server.write(LogEntry({"reward/mean": 0.75}, 5, is_evaluation=False, samples=[]))
    assert gauges(port) == {
        "one_step_off_reward_mean": 0.75,
        "one_step_off_ratio_mean": 1.0,
        "one_step_off_step": 5.0,
        "one_step_off_val_version": 4.0,
        "one_step_off_val_pass_4": 0.5,
    }
    server.close(False)


def test_no_two_metrics_share_a_gauge():
    """Whatever their names, also where the second comes later, and none changes its gauge."""
    server = loggers.Prometheus(port := free_port())
    names = [
        "reward/a_b/mean",
        "reward/a b/mean",
        "reward/a-b/mean",
        "reward/a/b/mean",
        "reward/a_x20_b/mean",
        "reward_x",
        "reward/x",
        "reward/\u6b63\u78ba\u7387/mean",
        "reward/\u901f\u5ea6\u5feb/mean",
        "reward/1/mean",
        "reward/x_total",
        "reward/x_created",
        "reward/\n/mean",
        "reward//mean",
    ]
    server.write(LogEntry({"reward/a b/mean": 1.0}, 1, False, []))
    assert gauges(port)["one_step_off_reward_a_x20_b_mean"] == 1.0
    for entry in (names[:6], names[6:]):
        server.write(LogEntry({name: names.index(name) for name in entry}, 2, False, []))
    values = gauges(port)
    server.write(LogEntry({name: names.index(name) for name in names}, 2, False, []))
    assert gauges(port) == values
    assert sorted(values.values()) == sorted([*range(len(names)), 2])
    plain = {"a_b_mean": 0, "a_x20_b_mean": 1, "x": 5, "1_mean": 9, "x_total": 10, "x_created": 11}
    for name, value in plain.items():
        assert values[f"one_step_off_reward_{name}"] == value
    page = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics",
        headers={"Accept": "application/openmetrics-text; version=1.0.0"},
    )
    with urllib.request.urlopen(page, timeout=5) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    assert {family.documentation for family in families} == {*names, "step"}
    server.close(False)


def test_of_metrics_that_come_at_once_the_one_like_ours_keeps_its_name():
    names = loggers.GaugeNames()
    names.add(["reward_x", "reward/x", "reward/x y", "reward/x-y", "reward/x_y"])
    assert names["reward/x"] == "one_step_off_reward_x"
    assert names["reward_x"].startswith("one_step_off_reward_x_")
    assert names["reward/x y"] == "one_step_off_reward_x_x20_y"


def test_the_dashboards_panels_lie_side_by_side():
    places = [
        (p["id"], *p["gridPos"].values()) for p in json.loads(DASHBOARD.read_text())["panels"]
    ]
    taken = [(x + i, y + j) for _, x, y, w, h in places for i in range(w) for j in range(h)]
    assert len(set(taken)) == len(taken)
    assert max(x for x, _ in taken) == 23
    assert len({number for number, *_ in places}) == len(places)


def test_it_listens_on_the_loopback_and_a_taken_port_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError,
            match=rf"^logging.prometheus_port={port}: OSError: .*in use; name another",
        ):
            loggers.Prometheus(port)
    server = loggers.Prometheus(port)
    assert server.server.server_address == ("127.0.0.1", port)
    server.close(True)
