"""`data.train_files=environment`: the tasks of `agent.environment`, as rows.

The adapter that plays an environment also prints its tasks. It is a program for `agent.python`,
which has the environment's packages.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from one_step_off.config.errors import ConfigError, key_error
from one_step_off.config.schema import Config
from one_step_off.config.sections.agent import EXTERNAL_LOOP
from one_step_off.config.sections.data import ENVIRONMENT_SOURCE as SOURCE

HELD_OUT_TASKS = 128
"""The first tasks are held out, this many or `data.val_size`, whether they are used or not: so a
run is not trained on other tasks because it is evaluated."""

MAX_START_S = 600.0
MAX_REASON_CHARS = 800


def read_tasks(cfg: Config, split: str) -> list[dict[str, Any]]:
    """The columns of the rows of one split.

    Args:
        split: "train", for `data.generator_size` tasks, or "test".

    Raises:
        ConfigError: there is no `agent.environment`, or it does not list its tasks.
    """
    if not cfg.agent.environment:
        return no_environment(split)
    held_out = cfg.data.val_size if cfg.data.val_size >= 0 else HELD_OUT_TASKS
    first, count = (held_out, cfg.data.generator_size) if split == "train" else (0, held_out)
    lines = _run_adapter(cfg, first, count).splitlines()
    # Libraries of the environment may print too.
    tasks = [json.loads(line) for line in lines if line.startswith('{"prompt"')]
    # Another loop would answer the text of the task, which is not what the environment asks.
    return [task | {"agent_loop": EXTERNAL_LOOP} for task in tasks]


def no_environment(split: str) -> list[dict[str, Any]]:
    """Raises ConfigError: the run has no environment that could have tasks."""
    raise ConfigError(
        f"data: the source {SOURCE!r} is the tasks of agent.environment, which is empty; set it, "
        "for example agent.environment=verifiers:NAME, or name other data"
    )


def _run_adapter(cfg: Config, first: int, count: int) -> str:
    """What the adapter prints of tasks `first` to `first + count`. Raises ConfigError."""
    kind, _, name = cfg.agent.environment.partition(":")
    python = cfg.agent.python or sys.executable
    command = [python, str(_adapter(kind)), str(first), str(count)]
    variables = {**os.environ, "AGENT_ENVIRONMENT": name, "OMP_NUM_THREADS": "1"}
    try:
        result = subprocess.run(
            command,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=MAX_START_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _refused(cfg, python, f"{type(error).__name__}: {error}") from error
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
        raise _refused(cfg, python, lines[-1][-MAX_REASON_CHARS:])
    return result.stdout


def _adapter(kind: str) -> Path:
    """The file of an adapter. It is found and not imported, because it needs packages that this
    interpreter may not have."""
    spec = importlib.util.find_spec("agent_loop")
    return Path(spec.origin).parent / "adapters" / f"{kind}_agent.py"


def _refused(cfg: Config, python: str, reason: str) -> ConfigError:
    fix = "fix it, or name with agent.python an interpreter that has the environment's packages"
    return key_error(cfg, "agent.environment", f"with the interpreter {python}: {reason}; {fix}")
