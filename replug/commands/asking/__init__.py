"""What `replug ask` is made of: options, evidence, ways to answer, and what is shown of an answer."""
