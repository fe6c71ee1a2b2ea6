from replug.evals.popqa import EVALUATION

__all__ = ["EVALUATION"]
