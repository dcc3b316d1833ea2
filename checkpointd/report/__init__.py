"""Answers questions about a root as frozen Structs, which the command line shows as tables or JSON.

Nothing here writes, except `verify --record`, which records its result in the log.

A damaged object never hides the others: the answer has a field for it. An error is raised only if the caller named the object.
"""
