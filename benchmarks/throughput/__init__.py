"""How many samples per second: colocated, synchronous, one step off, one step off with overlapped
weight sync.

`cases` has the arms and the cases, `report` the figures, tables and plots, `__main__` the command
line.
"""
