"""The explorer of the root's log: it runs the real code of `commit/log.py` and `commit/log_access.py` through every order in
which the operations of a few processes can fall, with every fault that a store may show, and checks promises in each world.

What is explored
  `scopes.py` lists the scopes. A scope is a log, the objects of up to five attempts, a few processes, and faults: crashes, lost
  and late replies, stale lists, power cuts, damaged entries and states. One step is one operation of the store. Requests for
  several entries are single gets in any order, and removals of several are single removals in any order. A scope is explored
  to its end, or up to 40,000 worlds in the gate and three million at night. Where it is explored to its end, every world must
  lead to one in which all have finished. The promises are in `promises.py`, and are kept by a ghost that knows none of the
  rules. `mutations.py` changes one rule of the real code at a time; the explorer must find each change.

What is not
  Damage of objects, the durability of objects, log/root (LOG-12), shown files, leases (a start may take any attempt for alive
  or dead), which objects of an attempt others need (a sweep takes all objects of an attempt, or none), more than the few
  entries of a scope: STATE_EVERY, STATES_KEPT and the like are small (`SMALL` in `explore.py`).

How it is fast
  A process is a value: its place in its program, the log as it knows it, and its machine. The real code computes what follows a
  reply once for each such value; after that, a step is arithmetic on integers. Where entries never go, a get of one that is
  there, and a put under a number that is taken, come to the same in any order, so they are taken at once.

How to add a scope
  Write the programs of its processes in `processes.py`, from the instructions in `programs.py`; add a function to `scopes.py`
  that gives the fields of a `Scope` for both sizes; and a mutation that only this scope finds. `python -m tests.model SCOPE`
  explores it, and prints the shortest way to a promise that breaks.
"""
