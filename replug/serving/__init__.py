"""A tuned retriever and its LM behind HTTP, in OpenAI's shapes: embeddings, searches, answers of REPLUG's ensemble."""
