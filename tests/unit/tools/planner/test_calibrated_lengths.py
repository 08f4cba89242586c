"""The lengths that the planner reads in the dumped samples of a run."""

from __future__ import annotations

import json

from one_step_off.tools.planner.calibration import _response_lengths


def test_segments_of_an_episode_are_one_length(tmp_path):
    """Else the rows of a group would shift, and its lengths would be those of two prompts."""
    rows = [{"length": 5}]
    for index, length in enumerate((3, 4, 2)):
        rows.append({"length": length, "segment": {"index": index, "count": 3, "parent": -1}})
    rows += [{"length": 7, "segment": None}, {"length": 1}]
    (tmp_path / "samples").mkdir()
    path = tmp_path / "samples" / "step_000000.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert _response_lengths(tmp_path, 2).tolist() == [[5, 9], [7, 1]]
