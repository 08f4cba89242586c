"""Python imports this by itself, in every process that has this folder on its PYTHONPATH: the chaos run's.

It wraps the functions of `points.py` as their modules are imported. A wrapped function looks for the file that the
runner has armed; the process that it means renames it (so only one can), says so, and kills or stops itself or, where
the point says so, its child, the engine; or it raises, hangs, or changes what is about to be compared.
"""

import functools
import importlib.abc
import importlib.util
import inspect
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

FOLDER = os.environ.get("CHAOS_FOLDER", "")
SEEN = {}  # calls so far, of each wish
AT = {"version": None}  # the weight version that this process is busy with


def _points():
    spec = importlib.util.spec_from_file_location(
        "chaos_points", Path(__file__).parent.parent / "points.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["chaos_points"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return [*module.NOTES, *module.POINTS]


class Finder(importlib.abc.MetaPathFinder):
    """Finds a module as the others do, and wraps what is in it once it has run."""

    def __init__(self, wanted):
        self.wanted = wanted

    def find_spec(self, name, path=None, target=None):
        if name not in self.wanted:
            return None
        points = self.wanted.pop(name)  # from now on this finder passes it over
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            for point in points:
                _wrap(module, point)

        spec.loader.exec_module = exec_module
        return spec


def _wrap(module, point):
    holder, names = module, point.where.partition(":")[2].split(".")
    for name in names[:-1]:
        holder = getattr(holder, name)
    real = holder.__dict__[names[-1]]

    def looks(args, kwargs, when):
        if when == "before" and point.version:
            AT["version"] = point.version(args)
        if (
            point.name
            and when == {"idle": "after"}.get(point.when, point.when)
            and os.path.exists(ARMED)
        ):
            _maybe(point, args, kwargs)

    if inspect.iscoroutinefunction(real):

        @functools.wraps(real)
        async def wrapped(*args, **kwargs):
            looks(args, kwargs, "before")
            answer = await real(*args, **kwargs)
            looks(args, kwargs, "after")
            return answer
    else:

        @functools.wraps(real)
        def wrapped(*args, **kwargs):
            looks(args, kwargs, "before")
            answer = real(*args, **kwargs)
            looks(args, kwargs, "after")
            return answer

    setattr(holder, names[-1], wrapped)


def _maybe(point, args, kwargs):
    try:
        with open(ARMED) as f:
            wish = json.load(f)
    except (OSError, ValueError):  # somebody else was faster
        return
    if (wish["kind"], wish["point"]) != (point.kind, point.name):
        return
    if point.only and not point.only(args, kwargs):
        return
    if wish.get("version") not in (None, AT["version"]):
        return
    SEEN[wish["id"]] = SEEN.get(wish["id"], -1) + 1
    if SEEN[wish["id"]] < wish["skip"]:  # a later call
        return
    victim = (
        _engine_of(os.getpid())
        if point.kind == "engine" and "vllm_replica" in point.where
        else os.getpid()
    )
    if victim is None:
        return
    claimed = os.path.join(FOLDER, f"claimed_{wish['id']}")
    try:
        os.rename(ARMED, claimed)
    except OSError:
        return
    _replace(os.path.join(FOLDER, f"hit_{wish['id']}"), wish | {"pid": victim, "time": time.time()})
    if wish["signal"] == "raise":
        raise RuntimeError(f"broken on purpose: {point.kind}, {point.name}")
    if wish["signal"] == "hang":
        time.sleep(1e6)
    if wish["signal"] == "corrupt":
        point.corrupt(args)
        return
    number = getattr(signal, wish["signal"])
    if point.when == "idle":
        threading.Timer(0.03, os.kill, (victim, number)).start()
    else:
        os.kill(victim, number)


def _engine_of(pid):
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as f:
            for child in f.read().split():
                with open(f"/proc/{child}/cmdline", "rb") as line:
                    if b"EngineCore" in line.read():
                        return int(child)
    return None


def _replace(path, what):
    mine = f"{path}.{os.getpid()}.{threading.get_ident()}"
    with open(mine, "w") as f:
        json.dump(what, f)
    os.replace(mine, path)


if FOLDER:
    ARMED = os.path.join(FOLDER, "armed")
    by_module = {}
    for one in _points():
        by_module.setdefault(one.where.partition(":")[0], []).append(one)
    sys.meta_path.insert(0, Finder(by_module))
