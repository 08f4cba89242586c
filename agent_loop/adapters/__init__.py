"""Agents that play the environments of other projects, for the interpreters that have them.

A file here runs in `agent.python`: it imports the standard library, aiohttp and its project alone,
and nothing of this package.
"""
