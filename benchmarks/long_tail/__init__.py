"""What partial rollouts gain when response lengths have a long tail, and how many requests an
engine should work on.

`report` has the figures, the table and the plot, `__main__` the arms and the command line.
"""
