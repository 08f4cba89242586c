"""Kills processes of real runs at random moments, and looks at what is left of the run."""
