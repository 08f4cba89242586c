"""Checkpoints: what one holds, how it is written and verified, and which one a run resumes from."""
