"""Codecs: how numbers become the words of a payload. A codec knows no rank but the one that rounds."""
