"""Encoders, language models and their wrappers. Everything here is testable without Ray."""
