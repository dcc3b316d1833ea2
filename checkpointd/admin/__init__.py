"""Commands that change a root: collection, deletion, recovery. Each reports its actions, real or planned."""
