"""The same task in TRL's GRPOTrainer and in this project: samples per second of both on the same
cores.

`trl_arm` is one run of TRL, `report` the figures, the table and the plot, `__main__` the command
line.
"""
