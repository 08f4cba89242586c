"""The report of a run in a real browser, out of folders that the real Tracker wrote, and out of broken ones."""

from __future__ import annotations

import html
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from one_step_off.config.schema import Config
from one_step_off.config.yaml_io import resolved_yaml
from one_step_off.data.samples import Batch, Sample
from one_step_off.monitoring import report
from one_step_off.monitoring.loggers import LogEntry, SampleDump
from one_step_off.monitoring.tracker import Tracker

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no chromium and no chrome is installed")
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
LANES = (
    "rollout 0", "rollout 1", "rollout 0 evaluation", "sync", "sync trainer 0", "sync rollout 0", "sync rollout 0.1 wire",
    "actor", "critic", "checkpoint", "checkpoint write",
)  # fmt: skip


def sample(step: int, index: int, text: str = "#### 4", length: int = 3) -> Sample:
    z = np.zeros(length)
    return Sample((0, step), index, np.arange(2), z, z, z > -1, np.full(length, max(0, step - 1)), reward=index % 2,
                  finish_reason="stop", response=text)  # fmt: skip


def make_run(
    folder: Path, steps: int = 12, first: int = 0, text: str = "#### 4", **more: float | None
) -> Tracker:
    """A run of made-up timings: generation, sync and update of one second each; from `first` on after an hour's pause."""
    tracker = Tracker(str(folder), steps, io.StringIO())
    (folder / "config.yaml").write_text(resolved_yaml(Config()))
    (folder / "versions.json").write_text(json.dumps({"torch": "2.13", "device": "cpu"}))
    held_out = [replace(sample(0, i), prompt_id=(-1, i)) for i in range(2)]
    tracker.start(first, [{"val/version": 0.0, "val/reward": 0.25}] if first else ())
    dump, begin = SampleDump(folder, lambda _: None), tracker.begin + 3600.0 * bool(first)
    for step in range(first, steps):
        at = begin + 2.0 * step
        tracker.span("sync", "weights", step, at, at + 0.2)
        for lane, what in (
            ("sync trainer 0", "wire"),
            ("sync rollout 0", "load"),
            ("sync rollout 0.1 wire", "wire"),
        ):
            tracker.trace([(lane, what, step, at + 0.05 + tracker.epoch, at + 0.1 + tracker.epoch)])
        tracker.span("rollout", "generate", step, at + 0.2, at + 1.7)
        for i in range(2):
            tracker.trace(
                [
                    (
                        f"rollout {i}",
                        "generate",
                        step,
                        at + 0.2 + tracker.epoch,
                        at + 1.5 + tracker.epoch,
                    )
                ]
            )
        tracker.span("actor", "update", step, at + 0.05, at + 1.9)
        tracker.span("critic", "update", step, at + 0.05, at + 1.1)
        if step % 3 == 0 and text:
            tracker.span("rollout", "evaluate", step, at + 0.2, at + 0.9)
            tracker.trace(
                [
                    (
                        "rollout 0 evaluation",
                        "evaluate",
                        step,
                        at + 0.2 + tracker.epoch,
                        at + 0.9 + tracker.epoch,
                    )
                ]
            )
            tracker.trace(
                [("checkpoint", "stall", step, at - 0.1 + tracker.epoch, at + tracker.epoch)]
            )
            tracker.trace(
                [("checkpoint write", "write", step, at + tracker.epoch, at + 0.8 + tracker.epoch)]
            )
            tracker.evaluation(step, held_out, 0.7)
        times = {
            "time/step_s": 2.0,
            "time/generate_s": 1.5,
            "time/train_s": 1.85,
            "time/sync_s": 0.2,
        }
        times |= {
            "time/wait_trainer_s": 0.3,
            "sync/wait_s": 0.1,
            "sync/load_s": 0.05,
            "sync/verify_s": 0.01,
        }
        figures = {
            "ratio/mean": 1.0 + step / 100,
            "actor/entropy": 1 / (1 + step),
            "actor/approx_kl": 1e-3 * step,
        }
        figures |= {
            "canary/logprob_diff_max": 1e-6,
            "restarts/replicas": float(step > 5),
            "restarts/trainer": 0.0,
        }
        batch = Batch(step, [sample(step, i, text, 3 + step + i) for i in range(4)], (0, 0))
        tracker.step(batch, step, times | figures | more)
        dump.write(LogEntry({}, step, False, batch.samples))
    return tracker


def opened(folder: Path, *options: str) -> tuple[str, list[str]]:
    """The page as the browser has it when all scripts have run, and what its console said."""
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--v=0",
        "--dump-dom",
    ]
    page = folder / "report.html"
    # Its own group: a helper process of the browser's would keep the pipe open.
    with subprocess.Popen(
        [*command, f"--user-data-dir={folder / 'browser'}", *options, f"file://{page}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as browser:
        try:
            dom, said = browser.communicate(timeout=60)
        finally:
            if browser.poll() is None:
                os.killpg(browser.pid, signal.SIGKILL)
    return dom, [line for line in said.splitlines() if "CONSOLE" in line]


def works_of(dom: str) -> dict[str, int]:
    """How many rectangles of work each lane of the picture has."""
    found = {}
    for lane, body in re.findall(r'<g data-lane="([^"]+)">(.*?)</g>', dom, re.S):
        found[lane] = len(re.findall(r'<rect [^>]*class="work"', body))
    return found


def curves_of(dom: str) -> dict[str, str]:
    """The path of each curve by its name."""
    return {
        name: path for path, name in re.findall(r'<path d="([^"]*)"[^>]*data-curve="([^"]*)"', dom)
    }


@needs_browser
def test_the_picture_and_the_curves_are_drawn_without_an_error(tmp_path):
    make_run(tmp_path).summary()
    report.write(tmp_path)
    dom, said = opened(tmp_path)
    assert said == []
    works = works_of(dom)
    assert set(works) == set(LANES), "the group's own lanes are left out where each replica has one"
    assert all(n >= 1 for n in works.values()) and works["actor"] >= 5
    curves = curves_of(dom)
    for name in (
        "training",
        "held out (at its version)",
        "mean",
        "longest",
        "step",
        "generate",
        "train",
        "entropy",
    ):
        assert re.fullmatch(r"M[\d. -]+(L[\d. -]+)+", curves[name]), name
    titles = [html.unescape(t) for t in re.findall(r"<figcaption>([^<]+)", dom)]
    assert {
        "Reward",
        "KL to the sampling policy, nats",
        "Entropy of the policy, nats",
        "Ratio of trained to sampling policy",
    } <= set(titles)
    text = html.unescape(re.sub(r"<script.*?</script>|<[^>]+>", " ", dom, flags=re.S))
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (
        f"{summary['idle_share/trainer']:.0%} idle" in text
        and f"{summary['idle_share/rollout']:.0%} idle" in text
    )
    assert re.search(r"cpu  ·  20\d\d-\d\d-\d\d \d\d:\d\d\s", text)
    assert re.search(r"replicas restarted\s+1\b", text) and "The run has not ended" not in text
    assert re.search(r"replica: load\s+50 ms", text) and re.search(
        r"replica: wait for data\s+100 ms", text
    )


@needs_browser
def test_parts_of_rewards_have_curves_and_stand_with_the_samples(tmp_path):
    parts = {f"part{i}": 0.1 * i for i in range(8)}
    make_run(tmp_path, **{f"reward/{name}/mean": mean for name, mean in parts.items()})
    evaluations = [
        {"val/version": float(v), "val/reward": 0.5, "val/reward/part1": 0.1 * v} for v in range(3)
    ]
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(e) + "\n" for e in evaluations))
    (path,) = tmp_path.glob("samples/step_000011.jsonl")
    rows = [
        json.loads(line) | {"reward_parts": {"right": 1.0, "form": 0.125}}
        for line in path.read_text().splitlines()
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    report.write(tmp_path)
    dom, said = opened(tmp_path)
    assert said == [] and "undefined" not in dom.partition('<script type="application/json"')[0]
    titles = [html.unescape(t) for t in re.findall(r"<figcaption>([^<]+)", dom)]
    assert {"Parts of the reward, training", "Parts of the reward, held out"} <= set(titles)
    assert set(parts) <= set(curves_of(dom)) and "reward 1 (right 1, form 0.125)" in dom


@needs_browser
def test_the_buttons_move_the_picture(tmp_path):
    """Each is pressed, and what it shows then is noted in the page."""
    make_run(tmp_path)
    page = report.write(tmp_path)
    press = """<script>{
    const log = [], note = what => log.push(what + ": " + document.querySelector(".controls > span").textContent);
    note("first");
    for (const button of document.querySelectorAll("button")) { button.click(); note(button.textContent); }
    const lanes = document.querySelectorAll("g[data-lane]").length, step = document.querySelector("input");
    step.value = 3; step.dispatchEvent(new Event("change")); note("step 3");
    document.body.append(Object.assign(document.createElement("pre"), { textContent: log.join(";") + ";" + lanes }));
    }</script></body>"""
    page.write_text(page.read_text().replace("</body>", press))
    dom, said = opened(tmp_path)
    noted = html.unescape(re.search(r"<pre>(first: [^<]+)", dom)[1]).split(";")
    assert said == []
    assert noted == [
        "first: steps 3 to 7, 10.40 s", "◀: steps 0 to 5, 10.40 s", "▶: steps 3 to 7, 10.40 s",
        "zoom in: steps 4 to 6, 5.20 s", "zoom out: steps 3 to 7, 10.40 s", "whole run: steps 0 to 11, 24.00 s",
        "sync by process: steps 0 to 11, 24.00 s", "step 3: steps 3 to 5, 6.00 s", str(len(LANES) - 3),
    ]  # fmt: skip


@needs_browser
def test_what_a_model_wrote_is_shown_and_not_run(tmp_path):
    make_run(tmp_path, steps=2, text=EVIL)
    report.write(tmp_path)
    assert EVIL not in (tmp_path / "report.html").read_text(), (
        "it would end the script that holds the data"
    )
    dom, said = opened(tmp_path)
    assert said == [] and html.escape(EVIL, quote=False) in dom
    assert "<img" not in dom and len(re.findall(r"<script", dom)) == 2


@needs_browser
@pytest.mark.parametrize(
    "kind",
    ["one step", "nothing", "no evaluation", "none and NaN", "resumed", "broken", "other rows"],
)
def test_any_folder_of_a_run_gives_a_page(tmp_path, kind):
    if kind == "one step":
        make_run(tmp_path, steps=1).summary()
    elif kind == "no evaluation":
        make_run(tmp_path, text="")
        assert not (tmp_path / "evaluations.jsonl").exists()
    elif kind == "none and NaN":
        make_run(
            tmp_path,
            **{"reward/mean": float("nan"), "actor/entropy": None, "ratio/mean": float("inf")},
        )
    elif kind == "resumed":
        make_run(tmp_path, steps=6)
        make_run(tmp_path, steps=12, first=4).summary()
    else:
        (tmp_path / "config.yaml").write_text("model: {path: x}\n")
    if kind == "broken":
        make_run(tmp_path, steps=3)
        for name in (
            "metrics.jsonl",
            "timeline.json",
            "evaluations.jsonl",
            "samples/step_000002.jsonl",
        ):
            (tmp_path / name).write_bytes(
                (tmp_path / name).read_bytes()[:-40] + b'\xff{"a": 1e999, NaN\n[3]\nnull\n'
            )
        for name in ("summary.json", "versions.json"):
            (tmp_path / name).write_text('{"seconds": ')
    if kind == "other rows":
        (tmp_path / "metrics.jsonl").write_text(
            '{"loss": 1e999, "step": NaN}\n{"step": "x", "time/step_s": 1}\n'
        )
        (tmp_path / "timeline.json").write_text(
            '[\n{"ph": "X"},\n{"ph": "X", "cat": 3, "name": 4, "ts": 1, "dur": 2},\n'
        )
    report.write(tmp_path)
    dom, said = opened(tmp_path)
    assert said == [] and ">Config<" in dom
    assert bool(curves_of(dom)) == (kind not in ("nothing", "other rows"))
    if kind == "none and NaN":
        assert "entropy" not in curves_of(dom) and "generate" in curves_of(dom)
    if kind == "resumed":
        width = re.search(r"steps (\d+) to (\d+), ([\d.]+) s", dom)
        assert float(width[3]) < 20, "the hour between the two lives is not in the window"
        assert int(width[2]) - int(width[1]) in (4, 5)


def steps_named(dom: str) -> list[tuple[float, float]]:
    """Where the names of the steps begin and, at 5.5 a letter (11 px), end."""
    found = re.findall(r'<text x="([\d.]+)" y="12" class="step">([^<]+)', dom)
    return [(float(x), float(x) + 5.5 * len(name)) for x, name in found]


@needs_browser
@pytest.mark.parametrize(("first", "steps"), [(3, 6), (1, 2), (1, 5)])
def test_a_run_in_short_attempts_opens_within_one_of_them(tmp_path, first, steps):
    """Of three steps and three, every five have the pause between the two among them."""
    make_run(tmp_path, steps=first)
    make_run(tmp_path, steps=steps, first=first).summary()
    page = report.write(tmp_path)
    dom, said = opened(tmp_path)
    shown = re.search(r"steps (\d+) to (\d+), ([\d.]+) s", dom)
    assert said == [] and float(shown[3]) <= 2.1 * max(first, steps - first), shown[0]
    assert int(shown[2]) < first or int(shown[1]) >= first, "of one attempt"
    press = """<script>[...document.querySelectorAll("button")].find(b => b.textContent === "whole run").click()</script></body>"""
    page.write_text(page.read_text().replace("</body>", press))
    for drawn in (dom, opened(tmp_path)[0]):
        named = steps_named(drawn)
        assert named and all(a[1] <= b[0] for a, b in zip(named, named[1:], strict=False)), (
            "one lies on another"
        )


@needs_browser
def test_the_numbers_on_an_axis_differ(tmp_path):
    """Of a ratio that hardly leaves 1, and of a canary within a tenth of a decade."""
    make_run(tmp_path, steps=6)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for i, row in enumerate(rows):
        row |= {"ratio/mean": 1.00001 + 3e-6 * i, "canary/logprob_diff_max": 4.1e-6 + 1e-7 * i}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    report.write(tmp_path)
    dom, said = opened(tmp_path)
    assert said == []
    axes = {
        title: re.findall(r'class="tick">([^<]+)', body)
        for title, body in re.findall(r"<figcaption>([^<]+)(.*?)</figure>", dom, re.S)
    }
    assert len(axes) >= 8 and all(len(set(ticks)) == len(ticks) >= 2 for ticks in axes.values()), (
        axes
    )
    assert axes["Ratio of trained to sampling policy"][0] == "1.00001"


@needs_browser
def test_of_a_long_run_the_middle_is_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "MOST_BYTES", 8000)
    make_run(tmp_path, steps=40)
    report.write(tmp_path)
    dom, said = opened(tmp_path)
    assert said == [] and re.search(r"is shown by \d+ spans from its middle", dom)
    assert 12 <= int(re.search(r"steps (\d+) to", dom)[1]) <= 24


def test_the_timeline_is_a_chrome_trace_with_names_and_an_order(tmp_path):
    make_run(tmp_path, steps=6)
    make_run(tmp_path, steps=8, first=6)  # a second process goes on in the file
    text = (tmp_path / "timeline.json").read_text()
    events = json.loads(text.rstrip().rstrip(",") + "]")
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    work = [e for e in events if e["ph"] == "X"]
    assert {e["ph"] for e in events} == {"X", "M"} and set(names.values()) == {
        *LANES,
        "rollout",
        "evaluation",
    }
    assert all(type(e["pid"]) is type(e["tid"]) is int for e in events), "the format has numbers"
    assert all(
        names[e["pid"], e["tid"]] == e["cat"] and e["dur"] >= 0 and e["args"]["step"] >= 0
        for e in work
    )
    assert processes == {
        1: "pipeline",
        10_000: "rollout 0",
        10_001: "rollout 1",
        20_000: "trainer 0",
    }
    inner = sorted(order, key=order.get)
    assert [name for tid in inner for (_, of), name in names.items() if of == tid][:4] == [
        "rollout", "evaluation", "sync", "actor",
    ]  # fmt: skip
    for key in names:  # what overlaps without being nested would be dropped
        spans = sorted((e["ts"], -e["dur"]) for e in work if (e["pid"], e["tid"]) == key)
        ends: list[int] = []
        for begin, length in spans:
            while ends and ends[-1] <= begin:
                ends.pop()
            assert not ends or begin - length <= ends[-1], names[key]
            ends.append(begin - length)


def test_a_run_that_fails_has_a_report_that_says_so_and_a_report_that_fails_is_one_line(
    tmp_path, monkeypatch
):
    make_run(tmp_path, steps=2)
    monkeypatch.setenv("SOME_API_KEY", "hush-hush-hush")
    said: list[str] = []
    with pytest.raises(ValueError, match="broke"), report.at_the_end(tmp_path, said.append):
        raise ValueError("it broke, with hush-hush-hush\nand more")
    page = (tmp_path / "report.html").read_text()
    assert "ValueError: it broke, with ***" in page and "and more" not in page and not said
    with pytest.raises(KeyboardInterrupt), report.at_the_end(tmp_path, said.append):
        raise KeyboardInterrupt
    assert '"ended": "KeyboardInterrupt' in (tmp_path / "report.html").read_text()
    with report.at_the_end(tmp_path, said.append):
        (tmp_path / "report.html").unlink()
        (tmp_path / "report.html").mkdir()
    assert said == [
        f"warning: no report.html: IsADirectoryError: [Errno 21] Is a directory: '{tmp_path}/report.html'"
    ]


def test_secrets_are_masked(tmp_path, monkeypatch):
    cfg = Config()
    cfg.reward_model.url = "https://user:pass-word@host/score?token=abcdef"
    make_run(tmp_path, steps=1, text="see https://me:pass-word@host/ and hush-hush-hush")
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump({"reward_model": {"url": cfg.reward_model.url}})
    )
    monkeypatch.setenv("SOME_API_KEY", "hush-hush-hush")
    page = report.write(tmp_path).read_text()
    assert "https://***@host" in page and not re.search("pass-word|abcdef|hush", page)


def test_the_command(tmp_path):
    command = [sys.executable, "-m", "one_step_off.report"]
    empty = tmp_path / "empty"
    empty.mkdir()
    for folder in (empty, tmp_path / "none"):
        done = subprocess.run([*command, str(folder)], capture_output=True, text=True)
        assert (
            done.returncode == 2
            and done.stderr.count("\n") == 1
            and f"error: {folder}: no run" in done.stderr
        )
    assert not list(empty.iterdir())
    run = tmp_path / "a run"
    make_run(run, steps=2)
    done = subprocess.run([*command, str(run)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{run}/report.html\n"), done.stderr
    (run / "report.html").unlink()
    (run / "report.html").mkdir()
    done = subprocess.run([*command, str(run)], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "Is a directory" in done.stderr


def test_the_page_asks_nobody_for_anything_and_is_installed():
    page = Path(report.__file__).with_suffix(".html").read_text()
    addresses = re.findall(r"https?://[^\s\"']+", page)
    assert addresses == ["http://www.w3.org/2000/svg"], "a name, not an address"
    assert "default-src 'none'" in page and page.count("{{data}}") == 1
    assert "*.html" in (Path(__file__).parents[3] / "setup.cfg").read_text()


def test_the_report_needs_neither_torch_nor_ray():
    code = "import sys, one_step_off.monitoring.report; print([m for m in ('torch', 'ray', 'vllm') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
        == "[]\n"
    )


def test_of_a_very_long_run_the_middle_of_its_timeline_is_read(tmp_path):
    """A run of weeks draws more spans than the driver has memory for."""
    line = '{"name": "generate 1", "cat": "rollout", "ph": "X", "ts": %d, "dur": 1, "pid": 1, "tid": 1},\n'
    (tmp_path / "timeline.json").write_text("[\n" + "".join(line % i for i in range(100_000)))
    found = report.collect(tmp_path)
    times = [event["ts"] for event in found["events"]]
    assert found["cut"] and len(times) < 60_000 and times == [*range(times[0], times[-1] + 1)]
    assert times[0] == pytest.approx(100_000 - times[-1], rel=0.2)
    (tmp_path / "timeline.json").write_text("[\n" + "".join(line % i for i in range(1000)))
    assert not (found := report.collect(tmp_path))["cut"] and len(found["events"]) == 1000
