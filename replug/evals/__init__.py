"""Evaluations: measure retrievers by their effect on the LM, and draw the results."""
