"""PopQA: its questions and prompts, popularity of subjects, and what is found by it (Mallen et al. 2023)."""
