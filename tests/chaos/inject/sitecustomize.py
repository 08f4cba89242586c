"""Python imports this in every process that has this folder on its PYTHONPATH: those of the chaos
run.

It wraps the functions of `points.py` when their modules are imported. A wrapped function looks for
the file that the runner has armed. The process that is meant renames it (so only one can), reports
the hit, and kills or stops itself or its child, the engine; or it raises, hangs, or changes what is
about to be compared.
"""

import contextlib
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
ARMED = os.path.join(FOLDER, "armed")
IDLE_DELAY_S = 0.03
CALLS_SEEN = {}
"""Id of an order -> matching calls so far, without the first."""
STATE = {"version": None}
"""The weight version that this process is busy with."""


def _load_points():
    """The module `points.py`, by its path: the product's processes have no package `tests`."""
    path = Path(__file__).parent.parent / "points.py"
    spec = importlib.util.spec_from_file_location("chaos_points", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["chaos_points"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


class Finder(importlib.abc.MetaPathFinder):
    """Finds a module as the other finders do, and wraps its functions after it has run."""

    def __init__(self, points_of_module):
        self.points_of_module = points_of_module

    def find_spec(self, name, path=None, target=None):
        if name not in self.points_of_module:
            return None
        points = self.points_of_module.pop(name)  # from now on this finder ignores the module
        spec = importlib.util.find_spec(name)
        exec_module = spec.loader.exec_module

        def exec_and_wrap(module):
            exec_module(module)
            for point in points:
                _wrap(module, point)

        spec.loader.exec_module = exec_and_wrap
        return spec


def _wrap(module, point):
    """Replace the point's function by one that calls `_visit` before and after."""
    *owners, function_name = point.where.partition(":")[2].split(".")
    holder = module
    for owner in owners:
        holder = getattr(holder, owner)
    function = holder.__dict__[function_name]

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def wrapped(*args, **kwargs):
            _visit(point, "before", args, kwargs)
            answer = await function(*args, **kwargs)
            _visit(point, "after", args, kwargs)
            return answer
    else:

        @functools.wraps(function)
        def wrapped(*args, **kwargs):
            _visit(point, "before", args, kwargs)
            answer = function(*args, **kwargs)
            _visit(point, "after", args, kwargs)
            return answer

    setattr(holder, function_name, wrapped)


def _visit(point, when, args, kwargs):
    """A wrapped function begins or has ended."""
    if when == "before" and point.version:
        STATE["version"] = point.version(args)
    point_when = "after" if point.when == "idle" else point.when
    if not point.name or when != point_when or not os.path.exists(ARMED):
        return
    order = _read_order()
    if order is None or not _matches(order, point, args, kwargs):
        return
    victim = _engine_of(os.getpid()) if point.hits_child else os.getpid()
    if victim is not None and _claim(order):
        _signal_others(order)
        _report_hit(order, victim)
        _execute(order, point, args, victim)


def _read_order():
    """What the runner has armed; None: another process was faster."""
    try:
        with open(ARMED) as file:
            return json.load(file)
    except (OSError, ValueError):
        return None


def _matches(order, point, args, kwargs):
    """Whether the order is for this call."""
    if (order["kind"], order["point"]) != (point.kind, point.name):
        return False
    if point.only and not point.only(args, kwargs):
        return False
    if order.get("version") not in (None, STATE["version"]):
        return False
    CALLS_SEEN[order["id"]] = CALLS_SEEN.get(order["id"], -1) + 1
    return CALLS_SEEN[order["id"]] >= order["skip"]


def _claim(order):
    """Whether this process, and no other, executes the order."""
    try:
        os.rename(ARMED, os.path.join(FOLDER, f"claimed_{order['id']}"))
    except OSError:
        return False
    return True


def _signal_others(order):
    """Send the signals for other processes; those that were there stay in the order."""
    hit = []
    for pid, name in order.get("also", ()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, getattr(signal, name))
            hit.append([pid, name])
    order["also"] = hit


def _report_hit(order, victim):
    """Write the file that the runner waits for, in one step."""
    path = os.path.join(FOLDER, f"hit_{order['id']}")
    new_path = f"{path}.{os.getpid()}.{threading.get_ident()}"
    with open(new_path, "w") as file:
        json.dump(order | {"pid": victim, "time": time.time()}, file)
    os.replace(new_path, path)


def _execute(order, point, args, victim):
    action = order["signal"]
    if action == "raise":
        raise RuntimeError(f"broken on purpose: {point.kind}, {point.name}")
    if action == "hang":
        time.sleep(1e6)
    if action == "corrupt":
        point.corrupt(args)
        return
    number = getattr(signal, action)
    if point.when == "idle":
        threading.Timer(IDLE_DELAY_S, os.kill, (victim, number)).start()
    else:
        os.kill(victim, number)


def _engine_of(pid):
    """The process id of the vLLM engine that a replica has started; None: there is none."""
    for task in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{task}/children") as children:
            child_pids = children.read().split()
        for child_pid in child_pids:
            with open(f"/proc/{child_pid}/cmdline", "rb") as command_line:
                if b"EngineCore" in command_line.read():
                    return int(child_pid)
    return None


def _install():
    """Wrap the functions of all points from now on."""
    points = _load_points()
    points_of_module = {}
    for point in [*points.VERSION_POINTS, *points.POINTS]:
        module_name = point.where.partition(":")[0]
        points_of_module.setdefault(module_name, []).append(point)
    sys.meta_path.insert(0, Finder(points_of_module))


if FOLDER:
    _install()
