"""Does a config learn, and does training one step off cost learning?

`curves` has what one run and one arm show, `comparison` the two arms against each other, `__main__`
the command line.
"""
