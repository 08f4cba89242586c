"""From a config to a finished run: prepare, start the processes, restart after failures, replay.

Read `run` in `launch.py` first; `api.py` is the Python API.
"""
