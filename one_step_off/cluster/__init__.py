"""What the program asks of its machines: placement groups, bounded waits, network links, cleanup, resource usage.

Knows nothing of models. Read `placement.py` first.
"""
