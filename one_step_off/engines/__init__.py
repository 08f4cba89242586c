"""What generates: the `Engine` seam in engine.py, and the engines."""
