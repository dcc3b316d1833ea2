"""Is this machine fit for it? Each check looks at one thing and returns a `Finding`; `examine` makes them all."""
