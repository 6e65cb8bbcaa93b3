"""Tests of the papers' claims, one module per claim; run by scripts/reproduce."""
