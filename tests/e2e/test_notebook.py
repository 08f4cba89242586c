"""The Python API in a real notebook kernel: the example of its page, the interrupt of a cell, and a
callback that stops."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ipykernel")
from jupyter_client.manager import start_new_kernel

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "python_api.md"
CELL_TIMEOUT_S = 240
SMALL = """
    rollout={"engine": "transformers", "n": 4},
    data={"train_batch_size": 4, "val_size": 8},
    actor={"ppo_mini_batch_size": 4},
"""

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]


class Notebook:
    """A kernel in a folder of its own, and the cells that are run in it."""

    def __init__(self, folder: Path) -> None:
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        self.manager, self.client = start_new_kernel(
            kernel_name="python3", cwd=str(folder), env=env
        )
        self.output = ""

    def start(self, code: str) -> str:
        """Begin to run a cell; returns the id of its request."""
        return self.client.execute(code)

    def finish(self, request: str) -> dict[str, Any]:
        """Wait until the cell has ended; returns the kernel's answer. `output` is what it
        printed."""
        self.output = ""
        deadline = time.monotonic() + CELL_TIMEOUT_S
        while True:
            message = self.client.get_iopub_msg(timeout=deadline - time.monotonic())
            if message["parent_header"].get("msg_id") != request:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                self.output += content["text"]
            if message["msg_type"] == "status" and content["execution_state"] == "idle":
                break
        return self.client.get_shell_msg(timeout=10)["content"]

    def run(self, code: str) -> dict[str, Any]:
        """Run a cell that must not fail."""
        answer = self.finish(self.start(code))
        assert answer["status"] == "ok", f"{answer}\n{self.output}"
        return answer

    def interrupt(self) -> None:
        """What the stop button does."""
        self.manager.interrupt_kernel()

    def close(self) -> None:
        """End the kernel."""
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    notebook = Notebook(tmp_path)
    yield notebook
    notebook.close()


def example_of_the_page() -> str:
    """The first block of Python of the page, with the engine that starts sooner, and small steps:
    what a notebook adds does not depend on them."""
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    config = '"gsm8k_tiny_cpu",\n'
    assert code.count(config) == 1
    return code.replace(config, config + SMALL)


@pytest.mark.ci
def test_the_example_of_the_page_runs_in_a_notebook(notebook: Notebook, tmp_path: Path):
    notebook.run("import asyncio; asyncio.get_running_loop()")  # as train finds it
    notebook.run(example_of_the_page())
    assert "step 4/4 [3]" in notebook.output
    assert "Warning" not in notebook.output
    notebook.run(
        "import json, pandas\n"
        "table = pandas.DataFrame(result.metrics)\n"
        "facts = {'steps': table['step'].tolist(), 'reward': float(table['reward/mean'].mean()),\n"
        "         'evaluations': len(result.evaluations), 'report': str(result.report),\n"
        "         'model': str(result.hf_model), 'summary': result.summary['steps']}\n"
        "print(json.dumps(facts))"
    )
    facts = json.loads(notebook.output)
    folder = "outputs/from_python"
    assert facts["steps"] == [0, 1, 2, 3]
    assert facts["summary"] == 4
    assert 0 <= facts["reward"] <= 1
    assert facts["evaluations"] > 0
    assert facts["report"] == f"{folder}/report.html"
    assert facts["model"] == f"{folder}/hf_model"
    assert (tmp_path / folder / "hf_model" / "model.safetensors").is_file()


LONG_RUN = """
from one_step_off import StopTraining, load_config, train

cfg = load_config(
    "gsm8k_tiny_cpu",
    trainer={"total_steps": 1000, "output_dir": "run", "resume": "auto"},
    data={"val_files": ""},
    rollout={"engine": "transformers"},
    logging={"tensorboard": False},
)
"""


# tests/unit/runtime/test_interrupts.py has the signals without a run.
def test_a_cell_is_interrupted_and_the_run_is_resumed_until_a_callback_stops_it(
    notebook: Notebook, tmp_path: Path
):
    notebook.run(LONG_RUN)
    request = notebook.start("train(cfg)")
    deadline = time.monotonic() + CELL_TIMEOUT_S
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    notebook.interrupt()
    answer = notebook.finish(request)
    assert answer["status"] == "error", notebook.output
    assert answer["ename"] == "KeyboardInterrupt", notebook.output
    assert "press Ctrl-C again to abort" in notebook.output
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    first = int(checkpoint.name.removeprefix("step_"))
    notebook.run(
        "steps = []\n"
        "def stop(step):\n"
        "    steps.append(step['step'])\n"
        "    raise StopTraining('one more step is enough')\n"
        "result = train(cfg, callbacks=[stop])\n"
        "print([steps, len(result.metrics), result.hf_model.name, result.checkpoints[-1].name])"
    )
    assert f"resuming from step {first} of 1000" in notebook.output
    assert f"stopped at step {first + 1}: one more step is enough" in notebook.output
    last_line = notebook.output.splitlines()[-1]
    assert last_line == str([[first], first + 1, "hf_model", f"step_{first + 1:06d}"])
