"""Proofs about the schemes, for the tests and scripts/reproduction.

The package itself does not call them.
"""
