"""Search engines: each is a module whose `ENGINE` makes it, and the key `web.engine` names the module.

An engine is added by its file. `ENGINE(EngineParts)` returns a `SearchEngine`.
"""
