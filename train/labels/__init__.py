"""Scores once, training many times: candidates scored by the LM, written down, and trained on without it."""
