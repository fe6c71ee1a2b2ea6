"""One short file for each evaluation: what of an example goes to the LM, and what the answer is worth."""
