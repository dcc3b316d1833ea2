"""One save after its snapshot: its runner, its handle, and the history."""
