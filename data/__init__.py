"""Raw text to a prepared set: a corpus store, training texts, held-out texts, and the proof that they are disjoint."""
