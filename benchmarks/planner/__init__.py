"""How well the planner predicts: against real runs, against published tables, and by formulas.

`validation` predicts runs and makes them, `published` simulates the runs of others, `paper`
computes what grows with the number of GPUs, `__main__` is the command line.
"""
