"""Random LMs answer here too."""

from tests.support.tiny_lms import random_lms_need_make_no_sense  # noqa: F401
