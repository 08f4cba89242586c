"""What the report reads of a run folder, its command, and the timeline, without a browser."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from one_step_off.monitoring import report
from tests.unit.monitoring.report_pages import LANES, make_run

ROOT = Path(__file__).parents[3]


# --- the timeline --------------------------------------------------------------------------------


@pytest.fixture
def events(tmp_path) -> list[dict]:
    """The events of a run that was resumed: a second process appends to the file."""
    make_run(tmp_path, steps=6)
    make_run(tmp_path, steps=8, first=6)
    text = (tmp_path / "timeline.json").read_text()
    return json.loads(text.rstrip().rstrip(",") + "]")


def spans_of(events: list[dict]) -> list[dict]:
    return [event for event in events if event["ph"] == "X"]


def lane_names(events: list[dict]) -> dict[tuple[int, int], str]:
    """(pid, tid) -> the name of the lane."""
    naming = [event for event in events if event["name"] == "thread_name"]
    return {(event["pid"], event["tid"]): event["args"]["name"] for event in naming}


def test_the_timeline_is_a_chrome_trace_with_names(events):
    names = lane_names(events)
    assert {event["ph"] for event in events} == {"X", "M"}
    assert set(names.values()) == {*LANES, "rollout", "evaluation"}
    for event in events:
        assert type(event["pid"]) is type(event["tid"]) is int, "the format has numbers"
    for span in spans_of(events):
        assert names[span["pid"], span["tid"]] == span["cat"]
        assert span["dur"] >= 0
        assert span["args"]["step"] >= 0


def test_processes_and_lanes_have_an_order(events):
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {
        1: "pipeline",
        10_000: "rollout 0",
        10_001: "rollout 1",
        20_000: "trainer 0",
    }
    sort_index = {
        e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"
    }
    name_of_tid = {tid: name for (_, tid), name in lane_names(events).items()}
    ordered = [name_of_tid[tid] for tid in sorted(sort_index, key=sort_index.get)]
    assert ordered[:4] == ["rollout", "evaluation", "sync", "actor"]


def test_spans_of_a_lane_are_nested_or_apart(events):
    """The viewers leave out spans that overlap otherwise."""
    for ids, name in lane_names(events).items():
        lane = [span for span in spans_of(events) if (span["pid"], span["tid"]) == ids]
        open_ends: list[int] = []
        for span in sorted(lane, key=lambda span: (span["ts"], -span["dur"])):
            while open_ends and open_ends[-1] <= span["ts"]:
                open_ends.pop()
            end = span["ts"] + span["dur"]
            assert not open_ends or end <= open_ends[-1], name
            open_ends.append(end)


SPAN = (
    '{"name": "generate 1", "cat": "rollout", "ph": "X", "ts": %d, "dur": 1, "pid": 1, "tid": 1},\n'
)


def write_spans(folder: Path, count: int) -> None:
    (folder / "timeline.json").write_text("[\n" + "".join(SPAN % i for i in range(count)))


def test_of_a_very_long_run_the_middle_of_its_timeline_is_read(tmp_path):
    """A run of weeks draws more spans than the driver has memory for."""
    count = 100_000
    write_spans(tmp_path, count)
    data = report.collect(tmp_path)
    times = [event["ts"] for event in data["events"]]
    assert data["cut"]
    assert len(times) < 60_000
    assert times == list(range(times[0], times[-1] + 1))
    assert times[0] == pytest.approx(count - times[-1], rel=0.2)


def test_of_a_short_run_the_whole_timeline_is_read(tmp_path):
    write_spans(tmp_path, 1000)
    data = report.collect(tmp_path)
    assert not data["cut"]
    assert len(data["events"]) == 1000


# --- how a run ended -----------------------------------------------------------------------------


def test_a_run_that_fails_has_a_report_that_says_so(tmp_path, monkeypatch):
    make_run(tmp_path, steps=2)
    monkeypatch.setenv("SOME_API_KEY", "hush-hush-hush")
    lines: list[str] = []
    with pytest.raises(ValueError, match="broke"), report.at_the_end(tmp_path, lines.append):
        raise ValueError("it broke, with hush-hush-hush\nand more")
    page = (tmp_path / "report.html").read_text()
    assert "ValueError: it broke, with ***" in page
    assert "and more" not in page
    assert not lines


def test_a_run_that_is_stopped_has_a_report_that_says_so(tmp_path):
    make_run(tmp_path, steps=2)
    with pytest.raises(KeyboardInterrupt), report.at_the_end(tmp_path, print):
        raise KeyboardInterrupt
    assert '"ended": "KeyboardInterrupt' in (tmp_path / "report.html").read_text()


def test_a_report_that_fails_is_one_line(tmp_path):
    make_run(tmp_path, steps=2)
    lines: list[str] = []
    with report.at_the_end(tmp_path, lines.append):
        (tmp_path / "report.html").mkdir()
    (line,) = lines
    assert line.startswith("warning: no report.html: IsADirectoryError: [Errno 21] Is a directory")
    assert line.endswith(f"-> '{tmp_path / 'report.html'}'")
    assert not list(tmp_path.glob(".report*")), "nothing half-written is left"


def test_secrets_are_masked(tmp_path, monkeypatch):
    url = "https://user:pass-word@host/score?token=abcdef"
    make_run(tmp_path, steps=1, text="see https://me:pass-word@host/ and hush-hush-hush")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"reward_model": {"url": url}}))
    monkeypatch.setenv("SOME_API_KEY", "hush-hush-hush")
    page = report.write(tmp_path).read_text()
    assert "https://***@host" in page
    assert not re.search("pass-word|abcdef|hush", page)


# --- the command and the page --------------------------------------------------------------------


def run_command(folder: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "one_step_off.report", str(folder)]
    return subprocess.run(command, capture_output=True, text=True)


def test_the_command_writes_the_page(tmp_path):
    run = tmp_path / "a run"
    make_run(run, steps=2)
    done = run_command(run)
    assert (done.returncode, done.stdout) == (0, f"{run}/report.html\n"), done.stderr


@pytest.mark.parametrize("name", ["empty", "none"])
def test_a_folder_without_a_run_is_refused(tmp_path, name):
    (tmp_path / "empty").mkdir()
    folder = tmp_path / name
    done = run_command(folder)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"error: {folder}: no run" in done.stderr
    assert not list((tmp_path / "empty").iterdir())


def test_a_page_that_cannot_be_written_is_refused(tmp_path):
    make_run(tmp_path, steps=2)
    (tmp_path / "report.html").mkdir()
    done = run_command(tmp_path)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "Is a directory" in done.stderr


def test_the_page_loads_nothing_from_elsewhere_and_is_installed():
    template = report.TEMPLATE.read_text()
    script = report.SCRIPT.read_text()
    addresses = re.findall(r"https?://[^\s\"']+", template + script)
    assert addresses == ["http://www.w3.org/2000/svg"], "a name, not an address"
    assert "default-src 'none'" in template
    assert template.count("{{data}}") == template.count("{{script}}") == 1
    assert "{{" not in script
    assert "*.html, *.js" in (ROOT / "setup.cfg").read_text()


def test_the_report_needs_neither_torch_nor_ray():
    code = (
        "import sys, one_step_off.monitoring.report; "
        "print([name for name in ('torch', 'ray', 'vllm') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
