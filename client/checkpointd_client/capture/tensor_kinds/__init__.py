"""Kinds of composite tensors: how each is taken apart into inner tensors, and made from them again."""
