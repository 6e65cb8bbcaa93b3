"""Codecs, which encode numbers as the words of a payload; independent of ranks except for random bits."""
