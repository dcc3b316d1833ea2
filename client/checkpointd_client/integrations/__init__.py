"""Other libraries' ways to save and load, on top of a Checkpointer. Each needs its library."""
