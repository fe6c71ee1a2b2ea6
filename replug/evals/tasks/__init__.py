"""A short file for each evaluation: what it needs, what of an example goes to the LM, what the answer is worth."""
