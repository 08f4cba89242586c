"""From a config to a finished run: prepare it, start its processes, restart them after failures, replay an update.

Read `launch.py` first.
"""
