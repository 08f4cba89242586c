"""Configs of other trainers as ours."""
