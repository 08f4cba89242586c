"""Frameworks that external agents are written with: real packages, each in a venv of its own."""
