"""The state of the pipeline as files: `state.json`, and `stream.npz` where the data position has
arrays with one number per prompt."""

import json
from pathlib import Path
from typing import Any

import numpy as np

STATE_FILE = "state.json"
ARRAYS_FILE = "stream.npz"


def without_arrays(state: dict[str, Any]) -> dict[str, Any]:
    """The part of the state that `state.json` holds."""
    position = {name: value for name, value in state["stream"].items() if name != "arrays"}
    return state | {"stream": position}


def write_state(state: dict[str, Any], folder: Path) -> None:
    """Write the state; the arrays of `state["stream"]["arrays"]` go into a file of their own."""
    arrays = state["stream"].get("arrays")
    if arrays is not None:
        np.savez(folder / ARRAYS_FILE, **arrays)
    text = json.dumps(without_arrays(state), indent=2)
    (folder / STATE_FILE).write_text(text + "\n")


def read_state(folder: Path) -> dict[str, Any]:
    """What `write_state` wrote into a checkpoint that has been verified."""
    state = json.loads((folder / STATE_FILE).read_text())
    if (folder / ARRAYS_FILE).is_file():
        with np.load(folder / ARRAYS_FILE, allow_pickle=False) as arrays:
            state["stream"]["arrays"] = dict(arrays)
    return state
