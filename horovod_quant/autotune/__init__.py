"""Candidates and decision of `Auto`, which finds the fastest method."""
