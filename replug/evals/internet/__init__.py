"""Answering from passages that a search engine found (Lazaridou et al. 2022): sets of questions, the grid, findings."""
