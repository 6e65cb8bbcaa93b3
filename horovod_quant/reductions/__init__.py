"""Reductions, the collectives that carry payloads of codecs.

A reduction knows no quantizer.
"""
