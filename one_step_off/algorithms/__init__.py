"""The mathematics as pure functions: advantage estimators, policy losses, KL, value loss,
schedules, batching.

Read `advantages.py` first. A new estimator is one function with `@register` in `advantages.py`, a
new policy loss one function with `@register` in `policy_losses.py`; no other change is needed.
"""
