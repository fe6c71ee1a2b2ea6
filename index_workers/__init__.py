"""The searchable corpus: embedded by builders, served by searchers, replaced version by version."""
