from replug.evals.internet_qa import EVALUATION

__all__ = ["EVALUATION"]
