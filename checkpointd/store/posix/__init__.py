"""The store on a POSIX file system, over a small interface that a simulated disk keeps as well."""
