"""Answers to questions with passages as evidence: candidates that an LM samples, factors, and what ranks them."""
