"""The report of a run in a real browser, also of broken run folders."""

from __future__ import annotations

import html
import itertools
import json
import re
from pathlib import Path

import pytest

from one_step_off.monitoring import report
from tests.unit.monitoring.report_pages import (
    LANES,
    add_script,
    make_run,
    needs_browser,
    open_page,
    read_rows,
    write_rows,
)

pytestmark = needs_browser

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
STEP_LABEL_LETTER_WIDTH = 5.5  # of letters of 11 px


def test_the_pipeline_is_drawn_without_an_error(tmp_path):
    make_run(tmp_path)
    report.write(tmp_path)
    page = open_page(tmp_path)
    assert page.messages == []
    spans = page.count_spans()
    assert set(spans) == set(LANES), "the group's own lanes are left out where each replica has one"
    assert all(count >= 1 for count in spans.values())
    assert spans["actor"] >= 5


def test_the_curves_are_drawn(tmp_path):
    make_run(tmp_path)
    report.write(tmp_path)
    page = open_page(tmp_path)
    curves = page.curves()
    names = ("training", "held out (at its version)", "mean", "longest", "step", "generate")
    for name in (*names, "train", "entropy"):
        assert re.fullmatch(r"M[\d. -]+(L[\d. -]+)+", curves[name]), name
    assert page.titles() >= {
        "Reward",
        "KL to the sampling policy, nats",
        "Entropy of the policy, nats",
        "Ratio of trained to sampling policy",
    }


def test_the_figures_are_those_of_the_summary(tmp_path):
    summary = make_run(tmp_path).summary()
    report.write(tmp_path)
    text = open_page(tmp_path).text
    assert f"{summary['idle_share/trainer']:.0%} idle" in text
    assert f"{summary['idle_share/rollout']:.0%} idle" in text
    assert re.search(r"cpu  ·  20\d\d-\d\d-\d\d \d\d:\d\d\s", text)
    assert re.search(r"replicas restarted\s+1\b", text)
    assert re.search(r"replica: load\s+50 ms", text)
    assert re.search(r"replica: wait for data\s+100 ms", text)
    assert "The run has not ended" not in text


def test_the_time_of_samples_is_stacked(tmp_path):
    make_run(tmp_path)
    report.write(tmp_path)
    assert "Where the time of a sample goes" not in open_page(tmp_path).text
    times = {"samples/queue_s": 0.5, "samples/decode_s": 1.5, "samples/tool_s": 0.0}
    make_run(tmp_path, **times)
    report.write(tmp_path)
    page = open_page(tmp_path)
    assert page.messages == []
    assert "Where the time of a sample goes" in page.text
    heights = {}
    for part in ("queue", "decode", "reward"):
        found = re.findall(f'height="([^"]+)"[^>]*data-part="{part}"', page.dom)
        heights[part] = list(map(float, found))
    assert len(heights["queue"]) == len(heights["decode"]) == 12
    assert heights["decode"][0] == pytest.approx(3 * heights["queue"][0])
    assert heights["reward"] == []


def test_parts_of_rewards_have_curves_and_are_shown_with_the_samples(tmp_path):
    parts = {f"part{i}": 0.1 * i for i in range(8)}
    make_run(tmp_path, **{f"reward/{name}/mean": mean for name, mean in parts.items()})
    evaluations = [
        {"val/version": float(version), "val/reward": 0.5, "val/reward/part1": 0.1 * version}
        for version in range(3)
    ]
    write_rows(tmp_path / "evaluations.jsonl", evaluations)
    (path,) = tmp_path.glob("samples/step_000011.jsonl")
    rows = [row | {"reward_parts": {"right": 1.0, "form": 0.125}} for row in read_rows(path)]
    write_rows(path, rows)
    report.write(tmp_path)
    page = open_page(tmp_path)
    assert page.messages == []
    drawn, _, _ = page.dom.partition('<script type="application/json"')
    assert "undefined" not in drawn
    assert page.titles() >= {"Parts of the reward, training", "Parts of the reward, held out"}
    assert set(page.curves()) >= set(parts)
    assert "reward 1 (right 1, form 0.125)" in page.dom


# Presses each button, and notes in the page what the picture shows then.
PRESS_BUTTONS = """{
const log = [];
const note = what => log.push(
    what + ": " + document.querySelector(".controls > span").textContent);
note("first");
for (const button of document.querySelectorAll("button")) {
    button.click();
    note(button.textContent);
}
const lanes = document.querySelectorAll("g[data-lane]").length;
const step = document.querySelector("input");
step.value = 3;
step.dispatchEvent(new Event("change"));
note("step 3");
log.push("lanes: " + lanes);
const element = document.createElement("pre");
element.textContent = log.join(";");
document.body.append(element);
}"""


def test_the_buttons_move_the_picture(tmp_path):
    make_run(tmp_path)
    report.write(tmp_path)
    add_script(tmp_path, PRESS_BUTTONS)
    page = open_page(tmp_path)
    assert page.messages == []
    notes = html.unescape(re.search(r"<pre>(first: [^<]+)", page.dom)[1]).split(";")
    assert notes == [
        "first: steps 3 to 7, 10.40 s",
        "◀: steps 0 to 5, 10.40 s",
        "▶: steps 3 to 7, 10.40 s",
        "zoom in: steps 4 to 6, 5.20 s",
        "zoom out: steps 3 to 7, 10.40 s",
        "whole run: steps 0 to 11, 24.00 s",
        "sync by process: steps 0 to 11, 24.00 s",
        "step 3: steps 3 to 5, 6.00 s",
        f"lanes: {len(LANES) - 3}",
    ]


def test_what_a_model_wrote_is_shown_and_not_run(tmp_path):
    make_run(tmp_path, steps=2, text=EVIL)
    path = report.write(tmp_path)
    assert EVIL not in path.read_text(), "it would end the script that holds the data"
    page = open_page(tmp_path)
    assert page.messages == []
    assert html.escape(EVIL, quote=False) in page.dom
    assert "<img" not in page.dom
    assert len(re.findall(r"<script", page.dom)) == 2


# --- any folder gives a page ---------------------------------------------------------------------


def write_page_of(folder: Path):
    """The report of a folder, which must be drawn without an error."""
    report.write(folder)
    page = open_page(folder)
    assert page.messages == []
    assert ">Config<" in page.dom
    return page


def test_a_run_of_one_step_gives_a_page(tmp_path):
    make_run(tmp_path, steps=1).summary()
    assert write_page_of(tmp_path).curves()


def test_a_run_without_an_evaluation_gives_a_page(tmp_path):
    make_run(tmp_path, text="")
    assert not (tmp_path / "evaluations.jsonl").exists()
    assert write_page_of(tmp_path).curves()


def test_metrics_without_values_give_no_curve(tmp_path):
    values = {"reward/mean": float("nan"), "actor/entropy": None, "ratio/mean": float("inf")}
    make_run(tmp_path, **values)
    curves = write_page_of(tmp_path).curves()
    assert "entropy" not in curves
    assert "generate" in curves


def test_the_pause_before_a_resume_is_not_in_the_picture(tmp_path):
    make_run(tmp_path, steps=6)
    make_run(tmp_path, steps=12, first=4).summary()
    page = write_page_of(tmp_path)
    assert page.curves()
    first, last, seconds = page.shown_steps()
    assert seconds < 20, "the hour between the two attempts"
    assert last - first in (4, 5)


def test_a_folder_without_steps_gives_a_page(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {path: x}\n")
    assert not write_page_of(tmp_path).curves()


def test_broken_files_give_a_page(tmp_path):
    make_run(tmp_path, steps=3)
    names = ("metrics.jsonl", "timeline.json", "evaluations.jsonl", "samples/step_000002.jsonl")
    for name in names:
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-40] + b'\xff{"a": 1e999, NaN\n[3]\nnull\n')
    for name in ("summary.json", "versions.json"):
        (tmp_path / name).write_text('{"seconds": ')
    assert write_page_of(tmp_path).curves()


def test_rows_of_another_program_give_a_page(tmp_path):
    (tmp_path / "config.yaml").write_text("model: {path: x}\n")
    rows = '{"loss": 1e999, "step": NaN}\n{"step": "x", "time/step_s": 1}\n'
    (tmp_path / "metrics.jsonl").write_text(rows)
    events = '[\n{"ph": "X"},\n{"ph": "X", "cat": 3, "name": 4, "ts": 1, "dur": 2},\n'
    (tmp_path / "timeline.json").write_text(events)
    assert not write_page_of(tmp_path).curves()


# --- which part of the run is shown --------------------------------------------------------------


def step_labels(dom: str) -> list[tuple[float, float]]:
    """Where the names of the steps begin and end in the picture."""
    labels = re.findall(r'<text x="([\d.]+)" y="12" class="step">([^<]+)', dom)
    return [(float(x), float(x) + STEP_LABEL_LETTER_WIDTH * len(name)) for x, name in labels]


def assert_labels_are_apart(dom: str) -> None:
    labels = step_labels(dom)
    assert labels
    for (_, end), (begin, _) in itertools.pairwise(labels):
        assert end <= begin, "one lies on another"


SHOW_WHOLE_RUN = """
const buttons = [...document.querySelectorAll("button")];
buttons.find(button => button.textContent === "whole run").click();
"""


@pytest.mark.parametrize(("first", "steps"), [(3, 6), (1, 2), (1, 5)])
def test_a_run_in_short_attempts_opens_within_one_of_them(tmp_path, first, steps):
    """Of three steps and three, every five have the pause between the two among them."""
    make_run(tmp_path, steps=first)
    make_run(tmp_path, steps=steps, first=first).summary()
    report.write(tmp_path)
    page = open_page(tmp_path)
    assert page.messages == []
    first_shown, last_shown, seconds = page.shown_steps()
    assert seconds <= 2.1 * max(first, steps - first)
    assert last_shown < first or first_shown >= first, "of one attempt"
    assert_labels_are_apart(page.dom)
    add_script(tmp_path, SHOW_WHOLE_RUN)
    assert_labels_are_apart(open_page(tmp_path).dom)


def test_of_a_long_run_the_middle_is_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "MAX_TIMELINE_BYTES", 8000)
    make_run(tmp_path, steps=40)
    report.write(tmp_path)
    page = open_page(tmp_path)
    assert page.messages == []
    assert re.search(r"is shown by \d+ spans from its middle", page.dom)
    first, _, _ = page.shown_steps()
    assert 12 <= first <= 24


def test_the_numbers_on_an_axis_differ(tmp_path):
    """Of a ratio that hardly leaves 1, and of a canary within a tenth of a decade."""
    make_run(tmp_path, steps=6)
    rows = read_rows(tmp_path / "metrics.jsonl")
    for i, row in enumerate(rows):
        row["ratio/mean"] = 1.00001 + 3e-6 * i
        row["canary/logprob_diff_max"] = 4.1e-6 + 1e-7 * i
    write_rows(tmp_path / "metrics.jsonl", rows)
    report.write(tmp_path)
    page = open_page(tmp_path)
    assert page.messages == []
    figures = re.findall(r"<figcaption>([^<]+)(.*?)</figure>", page.dom, re.S)
    axes = {title: re.findall(r'class="tick">([^<]+)', body) for title, body in figures}
    assert len(axes) >= 8
    for title, numbers in axes.items():
        assert len(numbers) >= 2, title
        assert len(set(numbers)) == len(numbers), title
    assert axes["Ratio of trained to sampling policy"][0] == "1.00001"


def test_the_data_of_a_page_is_json(tmp_path):
    make_run(tmp_path, steps=2)
    path = report.write(tmp_path)
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text())
    assert json.loads(data[1])["name"] == tmp_path.name
