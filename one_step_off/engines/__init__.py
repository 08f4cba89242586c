"""What generates: the `Engine` seam, and the engines behind it."""
