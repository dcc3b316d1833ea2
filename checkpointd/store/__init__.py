"""EFFECTS: where objects lie. `base` is the contract, `posix` and `memory` keep it."""
