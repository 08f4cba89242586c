"""Checkpoints: what one holds, how it is written and verified, and which one a run resumes from.

Read `checkpointer.py` first: it shows the files of a checkpoint. `find` in `finding.py` chooses
where a run resumes.
"""

from one_step_off.checkpoint.checkpointer import Checkpointer
from one_step_off.checkpoint.files import (
    read_batch,
    read_samples,
    read_state,
    write_batch,
    write_samples,
)
from one_step_off.checkpoint.finding import (
    TRAINED_ROLES,
    find,
    finished,
    fixed_keys,
    folder_of,
    loaded_roles,
    put_aside,
)
from one_step_off.checkpoint.manifest import empty_models

__all__ = [
    "TRAINED_ROLES",
    "Checkpointer",
    "empty_models",
    "find",
    "finished",
    "fixed_keys",
    "folder_of",
    "loaded_roles",
    "put_aside",
    "read_batch",
    "read_samples",
    "read_state",
    "write_batch",
    "write_samples",
]
