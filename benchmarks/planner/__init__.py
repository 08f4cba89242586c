"""How well the planner predicts: against real runs, and against published tables.

`validation` predicts runs and makes them, `published` simulates the runs of others, `__main__` is
the command line.
"""
