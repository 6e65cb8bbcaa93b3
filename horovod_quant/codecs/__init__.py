"""Codecs, which encode numbers as the words of a payload.

Independent of ranks except for random bits.
"""
