"""Answers to questions with passages as evidence: candidates sampled from an LM, their factors and rerankers."""
