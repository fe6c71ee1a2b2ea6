"""Encoders, language models and what wraps them. Everything here is testable without Ray."""

import transformers

# Every actor loads weights; transformers' bars and reports of each would drown our own progress lines.
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
