"""The FSDP2 back end."""
