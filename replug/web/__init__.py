"""From a question to passages: search engines, pages fetched behind a guard, snapshots of both, and passages."""
