"""Checks that end in every way a check can end."""

from __future__ import annotations

import os
import subprocess
import sys
import time

from one_step_off.tools.gpu_check.check import Check, CheckFailed, Context, Figures, Skip

HERE = __name__
LIMIT_S = 30.0
HANG_LIMIT_S = 1.5


def _check(name: str, limit_s: float = LIMIT_S, **more: object) -> Check:
    settings: dict = {"packages": (), **more}
    return Check(name, f"what {name} shows", f"{HERE}:{name}", limit_s, **settings)


def works(context: Context) -> Figures:
    return {"answer": 42, "device": context.device, "rows": ["a|b", "c"]}


def hangs(context: Context) -> Figures:
    """With a process of its own that ignores the end of its parent."""
    script = "import time; time.sleep(600)"
    child = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    (context.folder / "orphan").write_text(str(child.pid))
    time.sleep(600)
    return {}


def crashes(context: Context) -> Figures:
    os.abort()


def ends(context: Context) -> Figures:
    os._exit(3)


def raises(context: Context) -> Figures:
    raise ValueError("first line\nsecond line")


def fails(context: Context) -> Figures:
    raise CheckFailed("the subject is wrong", {"measured": 7})


def skips(context: Context) -> Figures:
    raise Skip("not here")


def cannot_be_imported(context: Context) -> Figures:
    return {}


CHECKS = (
    _check("works"),
    _check("hangs", HANG_LIMIT_S),
    _check("crashes"),
    _check("ends"),
    _check("raises"),
    _check("fails"),
    _check("skips"),
    Check("missing", "no such function", f"{HERE}:nothing", LIMIT_S, packages=()),
    _check("needs_gpu", cuda_only="a reason"),
    _check("needs_package", packages=("no_such_package_anywhere",)),
    _check("needs_cores", min_cores=10_000),
    _check("works_again"),
)

works_again = works
