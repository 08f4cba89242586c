"""What a run reports: the files of its folder, loggers, console, FLOPs, report and sample viewer.

Read `Tracker` in `tracker.py` first.
"""
