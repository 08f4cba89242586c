"""Ranks that are forked from a server: what they have of it, and what they tell when they fail."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.multiprocessing.spawn import ProcessRaisedException

from tests.unit import forked_ranks
from tests.unit.forked_ranks import PRELOADED, run_ranks


def write_facts(rank: int, folder: Path) -> None:
    facts = {"modules": sorted(sys.modules), "environment": os.environ.get("OF_THE_TEST")}
    (folder / f"{rank}.json").write_text(json.dumps(facts))


def test_they_find_their_modules_imported_and_have_the_environment_of_the_test(
    tmp_path, monkeypatch
):
    """The server passes over modules that it cannot import; each rank would import them again."""
    expected = set(PRELOADED)
    if importlib.util.find_spec("megatron") is None:
        expected = {name for name in expected if "megatron" not in name}
    for value in ("first", "second"):
        monkeypatch.setenv("OF_THE_TEST", value)
        run_ranks(write_facts, (tmp_path,), 2)
        for rank in range(2):
            facts = json.loads((tmp_path / f"{rank}.json").read_text())
            assert expected <= set(facts["modules"])
            assert facts["environment"] == value


FIRST_START = """
import os, sys
sys.path.insert(0, sys.argv[1])
from tests.unit import forked_ranks
from tests.unit.training.test_forked_ranks import write_facts
forked_ranks.PRELOADED[:] = ["tests.e2e.run_folder"]
forked_ranks.context()
os.environ["OF_THE_TEST"] = "later"
process = forked_ranks.process(write_facts, (0, forked_ranks.Path.cwd()))
process.start()
process.join()
"""


def test_the_first_start_may_be_in_any_folder_and_a_process_has_the_environment_of_its_start(
    tmp_path, monkeypatch
):
    """Also where it is started without `run_ranks`."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    command = [sys.executable, "-c", FIRST_START, str(forked_ranks.ROOT)]
    subprocess.run(command, cwd=tmp_path, check=True)
    facts = json.loads((tmp_path / "0.json").read_text())
    assert "tests.e2e.run_folder" in facts["modules"]
    assert facts["environment"] == "later"


def fail_in_rank_1(rank: int) -> None:
    if rank == 1:
        raise ValueError("broken on purpose")


def test_the_failure_of_a_rank_is_that_of_the_test():
    with pytest.raises(ProcessRaisedException, match="broken on purpose"):
        run_ranks(fail_in_rank_1, (), 2)
