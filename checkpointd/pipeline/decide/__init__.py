"""Decides the outcome of an attempt: as its coordinator, or in the recovery of a dead job."""
