"""Transports behind one contract: files in a shared folder, and a user's own; real senders and
receivers, each on a thread."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from one_step_off.config.errors import ConfigError
from one_step_off.config.schema import Config
from one_step_off.weight_sync import launch_order
from one_step_off.weight_sync.transports import shared_folder
from one_step_off.weight_sync.transports.shared_folder import FolderSender, SharedFolder
from one_step_off.weight_sync.transports.transport import load_transport, transport_settings
from tests.unit.weight_sync.kept_stream import SHAPES as KEPT_SHAPES
from tests.unit.weight_sync.kept_stream import KeptStream
from tests.unit.weight_sync.weight_stream import (
    SHAPES,
    WeightStream,
    assert_no_errors,
    assert_received,
    random_weights,
    run_together,
)

PAGE = Path(__file__).parents[3] / "docs" / "how_to" / "add_a_transport.md"


def folder_stream(folder: Path, senders: int = 1, receivers: int = 1, **more: Any) -> WeightStream:
    return WeightStream(
        SHAPES, senders, receivers, new_transport=partial(SharedFolder, folder), **more
    )


def assert_syncs(stream: WeightStream, versions: int = 3) -> None:
    for version in range(versions):
        weights = random_weights(SHAPES)
        results, received = stream.sync(weights, version)
        assert_no_errors(results)
        assert_received(received, weights)


def messages_in(folder: Path) -> list[str]:
    return [path.name for path in folder.rglob("*") if re.match(r"\.?\d{6}\.", path.name)]


@pytest.fixture
def users_transport(tmp_path, monkeypatch) -> str:
    """The code of the documentation, in a folder of its own: `module:Class`."""
    block = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert block is not None
    (tmp_path / "my_transport.py").write_text(textwrap.dedent(block[1]))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_transport", raising=False)
    return "my_transport:ThroughStore"


@pytest.mark.parametrize("order", [False, True], ids=["side by side", "ordered as on GPUs"])
@pytest.mark.parametrize(("senders", "receivers"), [(1, 1), (2, 3)])
def test_bits_arrive_over_files(tmp_path, monkeypatch, senders, receivers, order):
    monkeypatch.setitem(launch_order.IS_ORDERED, "cpu", order)
    assert_syncs(folder_stream(tmp_path, senders, receivers))
    assert messages_in(tmp_path) == []


def test_a_users_transport_syncs(users_transport):
    """Nothing of this project changes for it."""
    new_transport = partial(load_transport, users_transport, "")
    assert_syncs(WeightStream(SHAPES, 2, 2, new_transport=new_transport))


@pytest.mark.parametrize("is_users", [False, True], ids=["folder", "user's"])
def test_each_worker_gets_what_it_keeps(tmp_path, users_transport, is_users):
    new_transport: Any = partial(SharedFolder, tmp_path / "sync")
    if is_users:
        new_transport = partial(load_transport, users_transport, "")
    stream = KeptStream(2, 1, 2, new_transport=new_transport)
    for version, sharded_only in enumerate((False, True, True)):
        weights = random_weights(KEPT_SHAPES, "bfloat16")
        assert_no_errors(stream.sync_kept(weights, version, sharded_only))
        for layout in stream.layouts:
            layout.assert_holds(weights)


@pytest.mark.parametrize("spec", ["nowhere:Transport", "my_transport:Trough"])
def test_a_transport_that_does_not_exist_is_one_line(users_transport, spec):
    with pytest.raises(ConfigError, match="weight_sync.transport=") as raised:
        load_transport(spec, "")
    assert "\n" not in str(raised.value)


def test_two_runs_in_one_folder_have_their_own(tmp_path):
    folders = set()
    for name in ("a", "b"):
        cfg = Config()
        cfg.weight_sync.folder = str(tmp_path)
        cfg.trainer.output_dir = str(tmp_path / name)
        _, folder = transport_settings(cfg)
        assert Path(folder).parent == tmp_path
        folders.add(folder)
    assert len(folders) == 2


def test_a_new_epoch_has_a_folder_of_its_own(tmp_path):
    stream = folder_stream(tmp_path)
    assert_syncs(stream)
    stream.receivers.append(stream.new_receiver(1))
    stream.connect(2)
    assert_syncs(stream)
    assert [path.name for path in (tmp_path / "sender_0").iterdir() if path.is_dir()] == ["2"]


def test_a_sender_that_starts_again_begins_with_an_empty_folder(tmp_path):
    before = folder_stream(tmp_path)
    (tmp_path / "sender_0" / "1" / "set0" / "000099.safetensors").write_bytes(b"left behind")
    after = folder_stream(tmp_path)
    assert after.senders[0].address != before.senders[0].address
    assert messages_in(tmp_path) == []
    assert_syncs(after)


def spoiling(monkeypatch: pytest.MonkeyPatch, spoil: Any) -> None:
    """Let `spoil` change the file of the third bucket's message before it is announced."""
    write = shared_folder._write

    def changed(path: Path, content: bytes) -> None:
        if path.name == "000006.safetensors":
            content = spoil(content)
        write(path, content)

    monkeypatch.setattr(shared_folder, "_write", changed)


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda content: content[:-5], "cannot be read: SafetensorError"),
        (lambda content: content[:4], "cannot be read"),
        (lambda content: content[:-1] + bytes([content[-1] ^ 1]), "not what its manifest says"),
    ],
    ids=["torn", "torn in its header", "a bit"],
)
def test_a_spoiled_file_is_named_and_ends_the_sync_for_all(tmp_path, monkeypatch, spoil, expected):
    stream = folder_stream(tmp_path, receivers=2)
    spoiling(monkeypatch, spoil)
    begin = time.monotonic()
    results, _ = stream.sync(random_weights(SHAPES), 1)
    assert time.monotonic() - begin < 8
    sender, *receivers = map(str, results)
    assert any("000006.safetensors" in text and expected in text for text in receivers)
    assert expected in sender, "the sender names the cause, too"


def test_bytes_that_change_before_they_are_written_are_found_by_the_checksums(
    tmp_path, monkeypatch
):
    start_send = FolderSender.start_send

    def changed(self: FolderSender, tensor: torch.Tensor) -> None:
        if self.number == 5 and tensor.dtype == torch.uint8:
            tensor[3] ^= 4
        start_send(self, tensor)

    stream = folder_stream(tmp_path, timeout_s=4.0)
    monkeypatch.setattr(FolderSender, "start_send", changed)
    results, _ = stream.sync(random_weights(SHAPES), 1)
    assert "phase verify: checksum of bucket" in str(results[1])


@pytest.mark.parametrize(
    ("missing", "expected"),
    [(0, "did not write"), (1, r"no answer in 4(.0)? s of receivers \[0\]")],
    ids=["sender", "receiver"],
)
def test_a_missing_peer_ends_at_the_time_limit(tmp_path, missing, expected):
    stream = folder_stream(tmp_path, timeout_s=4.0)
    begin = time.monotonic()
    results, _ = stream.sync(random_weights(SHAPES), 1, change_jobs=lambda jobs: jobs.pop(missing))
    assert time.monotonic() - begin < 20
    assert re.search(expected, str(results[0]))


def test_an_abort_ends_all_waits(tmp_path):
    stream = folder_stream(tmp_path, receivers=2, timeout_s=20.0)
    threading.Timer(0.5, stream.senders[0].abort, [1, "rollout 1 died"]).start()
    begin = time.monotonic()
    results, _ = stream.sync(random_weights(SHAPES), 1, change_jobs=lambda jobs: jobs.pop())
    assert time.monotonic() - begin < 5
    assert len(results) == 2
    assert all("rollout 1 died" in str(result) for result in results)


def test_a_receiver_that_never_joins_is_named(tmp_path):
    stream = folder_stream(tmp_path, receivers=2, timeout_s=4.0)
    jobs = stream.connect_jobs(2)[:-1]
    begin = time.monotonic()
    results = run_together(jobs)
    assert time.monotonic() - begin < 20
    assert "of receivers [1]: joined" in str(results[0])


DYING = """
import os, sys
from pathlib import Path
import torch
from one_step_off.weight_sync.receiver import WeightReceiver
from one_step_off.weight_sync.transports.shared_folder import SharedFolder
from one_step_off.weight_sync.bucket_plan import BucketPlan
from tests.unit.weight_sync.weight_stream import CPU, HOST, SHAPES, row_pieces

folder, address = sys.argv[1:]
plan = BucketPlan.build(row_pieces(SHAPES, 1), 64)
receiver = WeightReceiver(plan, 0, CPU, HOST, 20.0, SharedFolder(folder))
receiver.connect(1, [(address, 0)], 1)
receiver.receive(lambda tensors: os._exit(9), 1)
"""


def test_a_process_that_dies_in_the_middle_leaves_nobody_waiting(tmp_path):
    """The sender ends at its time limit. Later a new epoch works."""
    stream = folder_stream(tmp_path, receivers=0, timeout_s=3.0)
    (sender,) = stream.senders
    arguments = [sys.executable, "-c", DYING, str(tmp_path), sender.address[0]]
    process = subprocess.Popen(arguments, env=os.environ | {"PYTHONPATH": os.getcwd()})
    try:
        sender.timeout_s = 60.0  # the process starts slowly
        sender.connect(1, 1)
        sender.timeout_s = 3.0
        weights = random_weights(SHAPES)
        (result,) = run_together([lambda: sender.send(stream.rows(weights, 0), 1)])
        assert "no answer in 3 s of receivers [0]" in str(result)
        assert process.wait(20) == 9
    finally:
        process.kill()
    stream.receivers.append(stream.new_receiver(0))
    stream.connect(2)
    assert_syncs(stream, 1)
