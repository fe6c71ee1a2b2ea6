"""REPLUG LSR: tune a dense retriever to a frozen, black-box language model.

The rooms lie at the top of the repository; here they have one name, `replug.ROOM`.
"""
