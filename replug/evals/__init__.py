"""Measuring retrievers by what they do for the LM, and the pictures of it."""
