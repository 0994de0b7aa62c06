"""The fault campaign: workloads, a nemesis, and checkers that judge the recorded history alone.

`python -m tests.faults` runs it by hand (`make faults`); the suite runs a short profile.
"""
