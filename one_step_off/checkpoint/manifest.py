"""The manifest of a checkpoint: size and checksum of every file, name and shape of every trained
parameter.

It is written last, when all other files are on the disk, and compared with them before a run
resumes. Pickles are checked too: they may contain only the few classes that a checkpoint needs
(`models/safe_unpickling.py`).
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from one_step_off.config.errors import first_line
from one_step_off.config.schema import Config
from one_step_off.training.worker_interface import TRAINED_ROLES
from one_step_off.training.written_files import FileFacts, file_checksum

FORMAT = 2
"""Version of the layout in `checkpointer.py`. Version 1 had no manifest."""

MANIFEST_FILE = "manifest.json"
CHECKSUM_THREADS = 8

Shapes = dict[str, list[int]]
"""Shape of every parameter, by "role: name"."""


def empty_models(cfg: Config) -> dict[str, Any]:
    """The models of the trainable roles, without weights, by role; {} where the models' code
    fails."""
    from one_step_off.models import hf_model  # torch and transformers: slow to import

    roles = [role for role in TRAINED_ROLES if role in cfg.placement.roles]
    try:
        return {role: hf_model.empty_model(cfg, role, None, None) for role in roles}
    except Exception:  # the models' code may raise anything; the trainer reports what does not fit
        return {}


def parameter_shapes(cfg: Config) -> Shapes:
    """Shape of every parameter of the trainable roles; {} if they are not known."""
    shapes: Shapes = {}
    for role, model in empty_models(cfg).items():
        for name, parameter in model.named_parameters():
            shapes[f"{role}: {name}"] = list(parameter.shape)
    return shapes


def file_facts(folder: Path, known: FileFacts | None = None) -> dict[str, dict[str, Any]]:
    """Size in bytes and checksum (XXH3-128) of every file but the manifest: {"bytes": ...,
    "checksum": ...}, each by the file's path in `folder`.

    Args:
        folder: of the checkpoint.
        known: of the files that need not be read here, because the process that wrote them has.

    Raises:
        RuntimeError: a known file has another size.
    """
    known = known or {}
    files = {
        path.relative_to(folder).as_posix(): path
        for path in folder.rglob("*")
        if path.is_file() and path.name != MANIFEST_FILE
    }
    sizes = {name: path.stat().st_size for name, path in files.items()}
    for name, (size, _) in known.items():
        if sizes.get(name) != size:
            raise RuntimeError(
                f"checkpoint {folder}: {name} has {sizes.get(name)} bytes, "
                f"but its writer counted {size}"
            )
    unread = {name: path for name, path in files.items() if name not in known}
    with ThreadPoolExecutor(CHECKSUM_THREADS) as pool:
        checksums = dict(zip(unread, pool.map(file_checksum, unread.values()), strict=True))
    for name, (_, checksum) in known.items():
        checksums[name] = checksum
    return {"bytes": sizes, "checksum": checksums}


def write_manifest(folder: Path, shapes: Shapes, known: FileFacts | None) -> dict[str, Any]:
    """Write the manifest of a folder whose other files are complete; returns what it holds.
    `known`: see `file_facts`."""
    manifest = {"format": FORMAT, "shape": shapes} | file_facts(folder, known)
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1) + "\n")
    return manifest


def find_fault(folder: Path, shapes: Shapes, roles: Sequence[str] = TRAINED_ROLES) -> str | None:
    """What is wrong with a checkpoint, whatever the settings of the run; None: nothing.

    Args:
        shapes: the parameters of the run's models, see `parameter_shapes`; {} where they are not
            known.
        roles: whose parameters are compared.

    Returns:
        One line that names a file that differs from the manifest, a parameter of another shape, or
        a pickle with a class that does not belong there.
    """
    try:
        manifest = json.loads((folder / MANIFEST_FILE).read_text())
    except Exception as e:  # broken bytes raise errors of any kind
        return _as_line(MANIFEST_FILE, e)
    try:
        written = manifest["format"]
        if written != FORMAT:
            return f"it has format {written}, and this version of one_step_off reads {FORMAT}"
        difference = next(_differences(folder, manifest, shapes, roles), None)
    except Exception as e:
        return _as_line("its files", e)
    return difference or _pickle_fault(folder, manifest)


def _differences(
    folder: Path, manifest: dict[str, Any], shapes: Shapes, roles: Sequence[str]
) -> Iterator[str]:
    """What differs from the manifest, one line each."""
    current_facts: dict[str, dict[str, Any]] = file_facts(folder)
    if manifest["shape"] and shapes:  # else one of the two sides is not known
        current_facts["shape"] = shapes
    for kind, current in current_facts.items():
        written = manifest[kind]
        for name in sorted(current.keys() | written.keys()):
            if kind == "shape" and name.partition(": ")[0] not in roles:
                continue
            if current.get(name) != written.get(name):
                is_now = current.get(name, "none")
                was_then = written.get(name, "none")
                yield f"{name}: its {kind}: {is_now}, but {was_then} when it was written"


def _pickle_fault(folder: Path, manifest: dict[str, Any]) -> str | None:
    from one_step_off.models import safe_unpickling

    for name in manifest["bytes"]:
        if name.endswith(".metadata"):
            try:
                safe_unpickling.check(str(folder / name))
            except Exception as e:
                return _as_line(name, e)
    return None


def _as_line(file: str, error: Exception) -> str:
    return f"{file}: {type(error).__name__}: {first_line(error)}"
