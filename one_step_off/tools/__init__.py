"""What no run needs: the planner, checks of a machine or a config, viewers, converters."""
