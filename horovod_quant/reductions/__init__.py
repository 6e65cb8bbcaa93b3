"""Reductions: which collectives carry the payloads of codecs. A reduction knows no quantizer."""
