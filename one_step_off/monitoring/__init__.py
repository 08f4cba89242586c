"""What a run tells of itself: the run folder's files, loggers, console, model FLOPs, report and sample viewer.

Read `Tracker` in `tracker.py` first.
"""
