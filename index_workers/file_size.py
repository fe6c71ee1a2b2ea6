"""How many rows of the corpus one file of vectors holds. Pure: `planning` counts the same files.

A file is the unit of a build: what a builder is given, what has a checksum, what an interrupted build has lost at
most for each call under way. So a small corpus has many files of a block each, which share out evenly and lose
little, and a large one has few for a file system to look after: 36 million documents make 550 files, not 35,157.
"""

FILES = 512  # about so many, as long as each holds a block and no more than the most rows
MOST_ROWS = 1 << 16  # 100 MB in 768 dimensions; embedded in 8 s by an A100


def rows_per_file(num_documents: int, block_documents: int) -> int:
    """Rows of every file but the last, whole blocks: by the corpus alone, whoever builds it."""
    wanted = -(-num_documents // (FILES * block_documents))
    return block_documents * max(1, min(wanted, MOST_ROWS // block_documents))
