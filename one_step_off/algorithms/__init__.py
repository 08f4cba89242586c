"""The mathematics as pure functions: advantage estimators, policy losses, KL, value loss, schedules, batching.

Read `advantages.py` first; a new estimator is one function there, a new loss one function in `policy_losses.py`.
"""
