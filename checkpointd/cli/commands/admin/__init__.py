"""Commands for the rare cases that a start does not set right by itself."""
