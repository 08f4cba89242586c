"""The pages that show how to add a reward, a tool, an agent loop and an environment: what they show
works, from a user's folder, without a change of ours."""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from one_step_off.main_ppo import main

ROOT = Path(__file__).parents[3]
PAGES = ROOT / "docs" / "how_to"
PROGRAM = "python -m one_step_off.main_ppo "
CANNED = "an episode against canned answers ended"


@dataclass
class Page:
    """The module that a page shows, and the arguments of its commands."""

    module: str
    code: str
    check: list[str]
    run: list[str]


def read(name: str) -> Page:
    text = (PAGES / name).read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    check, run = re.findall(rf"^ +{re.escape(PROGRAM)}(.*)$", text, re.M)
    module = re.match(r"# (\w+)\.py\n", code)
    assert module is not None
    return Page(module[1], code, shlex.split(check), shlex.split(run))


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("add_a_reward.md", ["PASS  reward", "1.1 (a dict: right 1, short 0.1)"]),
        ("add_a_tool.md", ["PASS  agent", "kilometers({\"miles\": 1.0}) answered '1.609'"]),
        ("add_an_agent_loop.md", ["PASS  agent", CANNED, "turns 2, reward 1"]),
        ("add_an_environment.md", ["PASS  agent", CANNED, "turns 1, reward 1"]),
    ],
)
def test_what_a_page_shows_works(name, parts, tmp_path, monkeypatch, capsys):
    page = read(name)
    (tmp_path / f"{page.module}.py").write_text(page.code)
    (tmp_path / "config").symlink_to(ROOT / "config")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop(page.module, None)
    code = main(page.check)
    lines = capsys.readouterr().out.splitlines()
    assert code == 0, lines
    assert any(all(part in line for part in parts) for line in lines), lines
    assert page.check == [*page.run, "--check"]
    assert any(page.module in argument for argument in page.run)
