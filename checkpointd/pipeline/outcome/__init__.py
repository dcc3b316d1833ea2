"""Puts the outcome of an attempt, which `commit/decide.py` decided: for the coordinator, or in the recovery of a dead job."""
