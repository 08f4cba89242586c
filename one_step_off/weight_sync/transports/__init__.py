"""How the messages of the weight stream travel: see transport.py for the contract, and
docs/how_to/add_a_transport.md.
"""
