"""Codecs: bytes to messages and back, one module per wire. They keep no state beyond a read buffer."""
