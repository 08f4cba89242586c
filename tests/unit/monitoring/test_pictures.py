"""The images of prompts in a run's folder: written once, named by the viewer, drawn by the
report."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest

from one_step_off.config.command_line import exit_code
from one_step_off.data.samples import Prompt, Sample
from one_step_off.monitoring import report
from one_step_off.monitoring.loggers import LogEntry, SampleDump
from one_step_off.tools import view

PNG = b"\x89PNG" + bytes(60)
JPEG = b"\xff\xd8\xff" + bytes(60)
PROMPTS = {(0, 0): (PNG, JPEG), (0, 1): (PNG,), (0, 2): ()}


def sample(prompt_id: tuple[int, int], index: int) -> Sample:
    ids = np.zeros(3, np.int32)
    numbers = np.zeros(3, np.float32)
    mask = np.ones(3, bool)
    return Sample(prompt_id, index, ids, ids, numbers, mask, ids, reward=1.0, response="two")


def find(prompt_id: tuple[int, int]) -> Prompt:
    return Prompt(prompt_id, np.zeros(3, np.int32), "How many?", "2", images=PROMPTS[prompt_id])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with a step of six samples."""
    samples = [sample(prompt_id, index) for prompt_id in PROMPTS for index in range(2)]
    advantages = [np.zeros(3)] * len(samples)
    SampleDump(tmp_path, find).write(LogEntry({}, 4, False, samples, advantages))
    (tmp_path / "config.yaml").write_text("{}")
    return tmp_path


def rows_of(run: Path) -> list[dict]:
    lines = (run / "samples/step_000004.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_each_image_is_written_once_with_its_own_bytes(run):
    files = sorted((run / "samples/images").iterdir())
    assert {file.suffix for file in files} == {".png", ".jpeg"}
    rows = rows_of(run)
    assert [len(row.get("images", ())) for row in rows] == [2, 2, 1, 1, 0, 0]
    assert [(run / name).read_bytes() for name in rows[0]["images"]] == [PNG, JPEG]
    assert rows[2]["images"] == rows[0]["images"][:1]
    assert "images" not in rows[4]


def test_the_viewer_names_the_files(run, capsys):
    assert exit_code(view.main, [str(run), "--longest", "6"]) == 0
    assert f"images: {', '.join(rows_of(run)[0]['images'])}" in capsys.readouterr().out


def test_the_report_holds_the_pictures_and_no_other_file(run):
    shown = {row["prompt_id"][1]: row for row in report.longest_samples(run)}
    url = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    assert shown[1]["images"] == [url]
    assert len(shown[0]["images"]) == 2
    assert "images" not in shown[2]
    rows = rows_of(run)
    for row in rows:
        row["images"] = ["config.yaml", "samples/images/../../config.yaml", "/etc/hostname", 7]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (run / "samples/step_000004.jsonl").write_text(text)
    assert all("images" not in row for row in report.longest_samples(run))
