"""What partial rollouts and oversampling gain when response lengths have a long tail.

`report` has the figures, the table and the plot, `__main__` the arms and the command line.
"""
