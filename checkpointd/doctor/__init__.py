"""Tests whether this machine is fit. Each check tests one thing and returns a `Finding`; `examine` runs them all."""
