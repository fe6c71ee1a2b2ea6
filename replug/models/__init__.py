"""Encoders, language models and what wraps them. Everything here is testable without Ray."""
