"""Configuration: YAML files and the one schema they are checked against. Imports nothing of ours."""
