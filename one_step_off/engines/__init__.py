"""What generates: the `Engine` seam and the registry `ENGINES` in engine.py, and the engines."""
