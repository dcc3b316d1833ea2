"""Shipped test tools: the store contract suite, and a simulated clock, disk and job to run the project on."""
