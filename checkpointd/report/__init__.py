"""Questions about a root, answered as frozen Structs: what the command line shows as tables or JSON.

Nothing here writes, but for `verify --record`, which leaves its result beside the checkpoint.

A damaged object never hides the others: it is a field of the answer, and only what was asked for by name raises.
"""
